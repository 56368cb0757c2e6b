// A server of both eras, with the TypeScript SDK; `reject` as its argument: of the modern one alone.
import { McpServer } from '@modelcontextprotocol/server';
import { serveStdio } from '@modelcontextprotocol/server/stdio';
import { z } from 'zod';

const numbers = z.object({ a: z.number(), b: z.number() });

serveStdio(() => {
  const server = new McpServer({ name: 'both-eras', version: '1' }, { capabilities: { tools: { listChanged: true } } });
  server.registerTool('add', { description: 'Adds.', inputSchema: numbers }, async ({ a, b }) => ({
    content: [{ type: 'text', text: String(a + b) }],
  }));
  return server;
}, { legacy: process.argv[2] || 'serve' });
