// An origin for proxy_origins.py: prints its port, then, for each line with a number on its input,
// the next connections, so many, once they have ended. It ends with its input.
"use strict";
const http = require("http");
const readline = require("readline");

const connections = [];
const asked = [];

function answer() {
  while (asked.length && connections.length >= asked[0]) {
    const first = connections.slice(0, asked[0]);
    if (!first.every((each) => each.hasEnded)) return;
    connections.splice(0, asked.shift());
    process.stdout.write(JSON.stringify(first.map((each) => each.seen)) + "\n");
  }
}

function record(request) {
  const seen = { method: request.method, target: request.url, headers: request.rawHeaders, body: null };
  request.socket.seen.requests.push(seen);
  return seen;
}

function serve(request, response) {
  const seen = record(request);
  const parts = [];
  request.on("data", (part) => parts.push(part));
  request.on("end", () => {
    seen.body = Buffer.concat(parts).toString("base64");
    if (!response.writableEnded) response.end();
  });
  request.on("error", () => {});
  if (request.url.includes("early")) response.end();
}

const server = http.createServer(serve);
server.on("checkContinue", serve);
server.on("checkExpectation", serve);
for (const name of ["upgrade", "connect"]) {
  server.on(name, (request, socket) => {
    record(request);
    socket.destroy();
  });
}
server.on("clientError", (error, socket) => {
  if (error.code === "ECONNRESET") socket.seen.isReset = true;
  else socket.seen.refusal = error.code;
  socket.destroy();
});
server.on("connection", (socket) => {
  const connection = { seen: { requests: [], refusal: null, isReset: false }, hasEnded: false };
  socket.seen = connection.seen;
  connections.push(connection);
  socket.on("error", () => {
    connection.seen.isReset = true;
  });
  socket.on("close", () => {
    connection.hasEnded = true;
    answer();
  });
});
server.listen(0, "127.0.0.1", () => process.stdout.write(server.address().port + "\n"));

const lines = readline.createInterface({ input: process.stdin });
lines.on("line", (line) => {
  asked.push(Number(line));
  answer();
});
lines.on("close", () => process.exit());
