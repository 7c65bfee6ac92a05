// A picture of the page of a service under load, once there is something of everything to see.

import { openPage, pause, until } from "./open.mjs";

const [url, out] = process.argv.slice(2);
const { browser, page, seen } = await openPage(url, { width: 1280, height: 1120 });
const full = await until(page, () => {
  const some = (kind, n) => document.querySelectorAll(`.request.${kind}`).length >= n;
  const compared = document.querySelector("#policies-words").textContent.match(/last (\d+) requests/)?.[1] ?? 0;
  return compared >= 12 && some("running", 2) && some("paused", 1) && some("waiting", 2) && !some("ended", 2);
}, 400);
await pause(150); // rows that change places have come to rest
await page.screenshot({ path: out });
await browser.close();
console.log(JSON.stringify({ full, ...seen }));
