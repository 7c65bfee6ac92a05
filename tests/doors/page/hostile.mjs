// A visit to a page with requests whose ids and tenants are written to do harm. What became of them, as JSON.

import { openPage, until } from "./open.mjs";

const { browser, page, seen } = await openPage(process.argv[2]);
const told = {};
told.rows = await until(page, () => document.querySelector("#rows li") && document.querySelector("#rows").innerText);
told.made = await page.evaluate(() => document.querySelectorAll("#main img, #main script, #main iframe").length);
told.ran = await page.evaluate(() => window.harm ?? false);
await browser.close();
console.log(JSON.stringify({ ...told, ...seen }));
