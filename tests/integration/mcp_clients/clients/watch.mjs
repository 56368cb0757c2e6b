// The official TypeScript client of the revision 2026-07-28, told that the tools changed. Says `watching`, then what is there.
import { Client, StreamableHTTPClientTransport } from "@modelcontextprotocol/client";

const { MCP_URL, MCP_KEY } = process.env;
let told;
const changed = new Promise((resolve, reject) => {
  told = resolve;
  setTimeout(() => reject(new Error("no notice came")), 60_000).unref();
});
const listChanged = { tools: { autoRefresh: true, onChanged: (problem, tools) => told(problem ? [String(problem)] : tools.map((tool) => tool.name)) } };
const client = new Client({ name: "test-watch", version: "1" }, { versionNegotiation: { mode: "auto" }, listChanged });
const requestInit = { headers: { Authorization: `Bearer ${MCP_KEY}` } };
await client.connect(new StreamableHTTPClientTransport(new URL(MCP_URL), { requestInit }));
console.log("watching");
console.log(JSON.stringify(await changed));
await client.close();
process.exit(0);
