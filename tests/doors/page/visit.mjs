// One visit to the page of a service that is idle at first, and then under load: what a person would see, as JSON.

import { openPage, pause, until } from "./open.mjs";

const url = process.argv[2];
const { browser, page, seen } = await openPage(url);
const text = (id) => page.$eval(id, (node) => node.textContent);
const told = {};

// Idle.
told.live = await until(page, () => document.querySelector("#connection.up")?.textContent);
told.empty = await until(page, () => !document.querySelector("#empty").hidden && document.querySelector("#empty").innerText);
told.workers = await until(page, () => document.querySelector(".worker")?.innerText);

// Under load: bars that move, and a request that was paused.
const load = setInterval(() => page.evaluate(() => document.querySelector("#samples").click()).catch(() => {}), 1500);
told.bars = await page.evaluate(async () => {
  const written = new Map(); // by request: what its bar told, one after the other
  for (const end = Date.now() + 60000; Date.now() < end; await new Promise((next) => setTimeout(next, 50))) {
    for (const row of document.querySelectorAll(".request.running")) {
      const [id, now] = [row.querySelector("code").textContent, row.querySelector("[role=progressbar]").getAttribute("aria-valuenow")];
      const before = written.get(id) ?? [];
      if (before.at(-1) !== now) written.set(id, [...before, now]);
      if (before.length > 3) return before.map(Number);
    }
  }
  return [];
});
told.cells = await until(page, () => ["own", "accepted", "rejected"].every((kind) => document.querySelector(`rect.${kind}`)));
told.paused = await until(page, () => document.querySelector(".request.paused .why")?.closest("li").innerText);
told.waiting = await until(page, () => document.querySelector(".request.waiting")?.innerText);
told.queue = await until(page, () => document.querySelector(".level-text")?.textContent);
told.squares = await until(page, () => document.querySelectorAll(".square").length);
told.policies = await until(page, () => {
  const rows = [...document.querySelectorAll(".policies tbody tr")];
  return rows.length && rows.map((row) => row.innerText);
}, 180);

// Keyboard: everything that can be used is reached with Tab, and can be seen to be.
told.usable = await page.evaluate(() => {
  const all = [...document.querySelectorAll("button, input, select, textarea, a[href], [tabindex='0']")];
  return all.filter((node) => node.checkVisibility() && !node.disabled).map((node) => node.id || node.className);
});
await page.evaluate(() => (document.activeElement?.blur(), scrollTo(0, 0)));
told.reached = [];
told.unseen = [];
for (let i = 0; i < 20; i++) {
  await page.keyboard.press("Tab");
  const [name, outlined] = await page.evaluate(() => {
    const node = document.activeElement;
    return [node.id || node.className, getComputedStyle(node).outlineStyle !== "none"];
  });
  told.reached.push(name);
  if (name && !outlined) told.unseen.push(name);
}

// Small screens, dark and light.
told.looks = [];
for (const scheme of ["light", "dark"]) {
  for (const width of [400, 700, 1280]) {
    await page.emulateMediaFeatures([{ name: "prefers-color-scheme", value: scheme }]);
    await page.setViewport({ width, height: 900 });
    await pause(300);
    const look = await page.evaluate(() => {
      const beyond = [...document.querySelectorAll("body *")].filter((node) => node.getBoundingClientRect().right > innerWidth + 1);
      const { backgroundColor, color } = getComputedStyle(document.body);
      return { wide: document.documentElement.scrollWidth, beyond: beyond.map((node) => node.className || node.id || node.tagName), backgroundColor, color };
    });
    told.looks.push({ scheme, width, ...look });
  }
}
await page.emulateMediaFeatures([{ name: "prefers-reduced-motion", value: "reduce" }]);
await until(page, () => !document.getAnimations().length); // what moved already comes to rest
told.motion = await page.evaluate(async () => {
  let most = 0;
  for (let i = 0; i < 40; i++) {
    most = Math.max(most, document.getAnimations().length);
    await new Promise((next) => setTimeout(next, 50));
  }
  return most;
});
clearInterval(load);

// A prompt, by keyboard alone.
await page.focus("#prompt");
await page.keyboard.type("Name three colors.");
await page.keyboard.down("Control");
await page.keyboard.press("Enter");
await page.keyboard.up("Control");
told.yours = await until(page, () => document.querySelector(".request.own-request .tags")?.textContent, 240); // behind all samples
told.answered = await until(page, () => / tokens? in /.test(document.querySelector("#answer-state").textContent) && document.querySelector("#answer-text").textContent, 240);
told.state = await text("#answer-state");
told.elsewhere = await page.evaluate(() => document.querySelector("#rows").innerText + document.querySelector("#levels").innerText);
await browser.close();
console.log(JSON.stringify({ ...told, ...seen }));
