// The official TypeScript clients of both eras: says as one JSON object what it saw. Argument: 1 or 2, the client's generation.
const generation = process.argv[2];
const { Client } = await import(generation === "1" ? "@modelcontextprotocol/sdk/client/index.js" : "@modelcontextprotocol/client");
const { StreamableHTTPClientTransport } = await import(
  generation === "1" ? "@modelcontextprotocol/sdk/client/streamableHttp.js" : "@modelcontextprotocol/client"
);
const asking = generation === "1" ? (await import("@modelcontextprotocol/sdk/types.js")).ElicitRequestSchema : "elicitation/create";

const { MCP_URL, MCP_KEY, MCP_RELAY, MCP_SESSION } = process.env;
const textOf = (result) => result.content.filter((block) => block.type === "text").map((block) => block.text).join("\n");
const seen = {};

async function connected(url, headers) {
  const capabilities = { elicitation: {} };
  const options = generation === "1" ? { capabilities } : { capabilities, versionNegotiation: { mode: "auto" } };
  const client = new Client({ name: "test-typescript", version: "1" }, options);
  client.setRequestHandler(asking, async (request) => ({
    action: "accept",
    content: { username: request.params.message, email: "ann@example.org" },
  }));
  const transport = new StreamableHTTPClientTransport(new URL(url), { requestInit: { headers } });
  await client.connect(transport);
  const call = (name, args = {}, options = undefined) =>
    generation === "1"
      ? client.callTool({ name, arguments: args }, undefined, options)
      : client.callTool({ name, arguments: args }, options);
  return { client, transport, call };
}

const headers = { Authorization: `Bearer ${MCP_KEY}`, ...(generation === "1" ? {} : { "Toolcrib-Session": MCP_SESSION }) };
{
  const { client, transport, call } = await connected(MCP_URL, headers);
  seen.revision = generation === "1" ? transport.protocolVersion : client.getNegotiatedProtocolVersion();
  seen.server = client.getServerVersion().name;
  seen.session = transport.sessionId ?? null;
  seen.tools = [];
  let cursor;
  do {
    const listed = await client.listTools(cursor ? { cursor } : {});
    seen.tools.push(...listed.tools.map((tool) => tool.name));
    cursor = listed.nextCursor;
  } while (cursor);
  seen.tools = [...new Set(seen.tools)];
  await call("python_execute", { code: "answer = 6 * 7" });
  seen.kept = textOf(await call("python_execute", { code: "print(answer)" }));
  seen.shell = textOf(await call("shell_execute", { command: "echo written > a.txt; id -u" }));
  seen.read = textOf(await call("file_read", { path: "a.txt" }));
  const failed = await call("python_execute", { code: "1 / 0" });
  seen.failed = [failed.isError, textOf(failed)];
  const bad = await call("python_execute", { cod: "1" });
  seen.bad = [bad.isError, textOf(bad)];
  await call("no_such_tool").catch((problem) => (seen.unknown = [problem.code, problem.message]));
  const asked = await call("test_elicitation", { message: "Who are you?" });
  seen.asked = [asked.isError, textOf(asked)];
  seen.progress = [];
  await call("test_tool_with_progress", {}, { onprogress: (told) => seen.progress.push([told.progress, told.total]) });
  const stop = new AbortController();
  const command = "echo begun > c.txt; sleep 30; echo done > c.txt";
  const long = call("shell_execute", { command }, { signal: stop.signal }).catch((problem) => problem.message);
  await call("shell_execute", { command: "until [ -e c.txt ]; do sleep 0.1; done" });
  stop.abort("no longer wanted");
  await long;
  const gone = "for n in $(seq 50); do pgrep -f '^sleep 30' > /dev/null || break; sleep 0.2; done";
  seen.cancelled = textOf(await call("shell_execute", { command: `${gone}; cat c.txt; pgrep -cf '^sleep 30'` }));
  if (generation === "1") {
    await transport.terminateSession();
  }
  await client.close();
}
if (generation === "1") {
  const { client, transport, call } = await connected(MCP_RELAY, {});
  const code = "import time\nfor n in range(6):\n    time.sleep(0.3)\nprint('whole')  # cut-this-stream";
  seen.resumed = textOf(await call("python_execute", { code }));
  await transport.terminateSession();
  await client.close();
} else {
  const { client, call } = await connected(MCP_URL, headers); // as another process of the same user would come
  seen.resumed = textOf(await call("python_execute", { code: "print(answer)" }));
  await client.close();
}
console.log(JSON.stringify(seen));
