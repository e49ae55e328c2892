// Perfetto's trace processor, compiled to WebAssembly, behind a Unix socket that the Python package `perfetto` speaks to.
//
//     node trace_processor.mjs FOLDER SOCKET
//
// FOLDER has the engine as Perfetto's page runs it: engine_bundle.node.js (code of a web worker) and trace_processor.wasm. A worker and
// that page pass chunks of a byte stream (TraceProcessorRpcStream) through a message port, and so do a server and a client on a socket;
// so bytes are handed on here as they are. One connection, then the process ends.

import { readFileSync } from "node:fs";
import { createServer } from "node:net";
import { join } from "node:path";
import { pathToFileURL } from "node:url";

const [folder, path] = process.argv.slice(2);

// What a web worker has and node has not, as far as the engine asks for it.
globalThis.self = globalThis;
globalThis.WorkerGlobalScope = Object;
globalThis.location = { href: pathToFileURL(folder + "/").href };
globalThis.XMLHttpRequest = class {
    open(method, name) {
        this.name = name;
    }
    send() {
        this.response = readFileSync(join(folder, this.name));
    }
};
// The engine takes its variant for memory of 64 bits, which is not in the folder, where a module of such memory alone compiles.
const MEMORY_SECTION = 5;
const { Module } = WebAssembly;
WebAssembly.Module = function (bytes) {
    if (bytes[8] === MEMORY_SECTION) { // the first section behind magic and version
        throw new Error("memory of 32 bits only");
    }
    return new Module(bytes);
};
console.log = console.warn; // stdout says one thing: that the socket is there

await import(pathToFileURL(join(folder, "engine_bundle.node.js")));
const port = {};
self.onmessage({ data: port });

const server = createServer((socket) => {
    server.close();
    port.postMessage = (bytes) => socket.write(bytes);
    socket.on("data", (bytes) => port.onmessage({ data: bytes }));
    socket.on("close", () => process.exit());
});
server.listen(path, () => process.stdout.write("listening\n"));
