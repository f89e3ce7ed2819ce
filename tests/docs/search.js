// node search.js WORKER INDEX QUERY ...: the pages that the site's search finds, as JSON, in the order in which a browser lists them.
// WORKER is the script of the theme that searches in the browser; INDEX is search/search_index.json of a built site.
const fs = require("fs");
const vm = require("vm");

const [worker, index, ...queries] = process.argv.slice(2);
let answer, handle;
globalThis.self = globalThis;
globalThis.addEventListener = (_, handler) => (handle = handler);
globalThis.postMessage = (message) => (answer = message.data);
vm.runInThisContext(fs.readFileSync(worker, "utf-8"));

async function main() {
  const { config, docs } = JSON.parse(fs.readFileSync(index, "utf-8"));
  await handle({ data: { type: 0, data: { config, docs, options: { suggest: false } } } }); // set up
  const found = {};
  for (const query of queries) {
    await handle({ data: { type: 2, data: query } });
    found[query] = answer.items.map((page) => page.map((part) => part.location));
  }
  console.log(JSON.stringify(found));
}
main();
