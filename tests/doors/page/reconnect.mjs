// A visit to the page through a proxy of our own, which cuts its connections once and forgets them once: then they stay
// open, and nothing comes. What was seen, as JSON.

import net from "node:net";

import { openPage, pause, until } from "./open.mjs";

const { hostname, port } = new URL(process.argv[2]);
const told = {};
let pairs = [];
let feeds = 0; // that were asked for
let frames = 0; // that came

function count(bytes) {
  feeds += bytes.includes("GET /page/feed");
  frames += bytes.includes("data: ");
}

function relay(client) {
  const server = net.connect(Number(port), hostname);
  pairs.push([client, server]);
  for (const [from, to] of [[client, server], [server, client]]) {
    from.on("data", (bytes) => {
      count(bytes);
      to.write(bytes);
    });
    from.on("error", () => to.destroy());
    from.on("close", () => to.destroy());
  }
}

const proxy = net.createServer(relay);
const listening = (at) => new Promise((done) => proxy.listen(at, "127.0.0.1", done));
await listening(0);
const own = proxy.address().port;
const { browser, page } = await openPage(`http://127.0.0.1:${own}/`);
const connection = () => page.$eval("#connection", (node) => node.textContent);
const isUp = () => document.querySelector("#connection.up") !== null;
const isAway = () => document.querySelector("#connection.away") !== null;

told.live = await until(page, isUp);

proxy.close();
pairs.flat().forEach((socket) => socket.destroy());
told.cut = (await until(page, isAway)) && (await connection());
pairs = [];
await listening(own);
told.again = await until(page, isUp);

pairs.flat().forEach((socket) => socket.removeAllListeners("data").resume()); // read, and thrown away
feeds = frames = 0;
for (const end = Date.now() + 90_000; !(feeds && frames) && Date.now() < end; ) await pause(50);
told.forgotten = { feeds, frames, live: await until(page, isUp) };

await browser.close();
proxy.close();
pairs.flat().forEach((socket) => socket.destroy());
console.log(JSON.stringify(told));
