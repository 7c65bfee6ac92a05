// A headless Chromium on the page, with an eye on what no page may do. No checks live here.

import { createRequire } from "node:module";

const puppeteer = createRequire(import.meta.url)(process.env.PUPPETEER);

export const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

export async function openPage(url, { width = 1280, height = 900, scheme = "light" } = {}) {
  const browser = await puppeteer.launch({
    executablePath: process.env.CHROMIUM,
    args: ["--no-sandbox", "--disable-gpu", "--hide-scrollbars"],
  });
  const page = await browser.newPage();
  const seen = { errors: [], foreign: [], failed: [] };
  const tell = (text) => seen.errors.push(text);
  page.on("console", (message) => ["error", "warning"].includes(message.type()) && tell(message.text()));
  page.on("pageerror", (error) => tell(error.message));
  page.on("requestfailed", (request) => seen.failed.push(`${request.url()} ${request.failure()?.errorText}`));
  page.on("request", (request) => !request.url().startsWith(url) && seen.foreign.push(request.url()));
  await page.emulateMediaFeatures([{ name: "prefers-color-scheme", value: scheme }]);
  await page.setViewport({ width, height });
  await page.goto(url, { waitUntil: "domcontentloaded" });
  return { browser, page, seen };
}

// What `look` gives in the page, as soon as it gives anything; null after `most_s` seconds.
export async function until(page, look, most_s = 90, ...args) {
  for (const end = Date.now() + 1000 * most_s; Date.now() < end; await pause(50)) {
    const found = await page.evaluate(look, ...args);
    if (found) return found;
  }
  return null;
}
