// A visit to the page of a service with keys: a wrong key, then the right one, then out again. What was seen, as JSON.

import { openPage, until } from "./open.mjs";

const [url, key] = process.argv.slice(2);
const { browser, page, seen } = await openPage(url);
const told = {};

async function give(text) {
  await page.focus("#key");
  await page.keyboard.type(text);
  await page.keyboard.press("Enter");
}

told.asked = await until(page, () => !document.querySelector("#login").hidden && document.querySelector("#main").hidden);
await give("laps_00000000_wrong");
told.refused = await until(page, () => !document.querySelector("#problem").hidden && document.querySelector("#problem").textContent);
await give(`Bearer ${key} `); // as it is pasted from a header
told.live = await until(page, () => !document.querySelector("#main").hidden && document.querySelector("#connection.up") !== null);
told.left = await page.$eval("#key", (input) => input.value);
told.readable = await page.evaluate(() => document.cookie);
told.addresses = await page.evaluate(() => performance.getEntries().map((entry) => entry.name).join(" "));
await page.reload({ waitUntil: "domcontentloaded" });
told.again = await until(page, () => document.querySelector("#connection.up") !== null);
await page.focus("#prompt");
await page.keyboard.type("what nobody else is to read");
await page.click("#logout");
told.out = await until(page, () => !document.querySelector("#login").hidden && document.querySelector("#main").hidden);
told.kept = await page.$eval("#prompt", (box) => box.value);
await browser.close();
console.log(JSON.stringify({ ...told, ...seen }));
