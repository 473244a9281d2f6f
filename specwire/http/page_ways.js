"use strict";
// What the server chooses among for requests that leave the draft to it: a table that follows it while it is open.

const WAYS_PAUSE_MS = 3000;
let followingWays = false;

async function followWays() {
  if (followingWays) return;
  followingWays = true;
  while ($("ways").open) {
    await showWays().catch((error) => tellWays("", error.message, []));
    await new Promise((resolve) => setTimeout(resolve, WAYS_PAUSE_MS));
  }
  followingWays = false;
}

async function showWays() {
  const response = await fetch("ways", { headers: headers() });
  if (!response.ok) throw await refusal(response);
  const { ways, why_plain: why, num_workers: numWorkers } = await response.json();
  const about = ways.length
    ? "Tokens a second of a stream where the server decides: expected with as many streams as now, and when last measured."
    : "Nothing to choose among yet: costs are known after a request that drafts.";
  tellWays(why, numWorkers > 1 ? `${about} Of the one worker that answered, of ${numWorkers}.` : about, ways);
}

function tellWays(why, text, ways) {
  $("ways-why").textContent = `Decoded plainly: ${why}.`;
  $("ways-why").hidden = !why;
  $("ways-told").textContent = text;
  const table = $("ways").querySelector("table");
  table.hidden = !ways.length;
  const most = Math.max(...ways.flatMap((way) => [way.expected_tokens_per_s, way.measured_tokens_per_s]));
  table.tBodies[0].replaceChildren(...ways.map((way) => wayRow(way, most)));
}

/** A bar as long as what is expected, with a line at what was measured. */
function wayRow({ name, is_chosen: isChosen, expected_tokens_per_s: expected, measured_tokens_per_s: measured }, most) {
  const [bar, line] = [element("i"), element("b", { hidden: !measured })];
  bar.style.width = `${(100 * expected) / most}%`;
  line.style.left = `${(100 * measured) / most}%`;
  const share = element("td", { className: "share" }, [element("div", {}, [bar, line])]);
  const head = element("th", { scope: "row", textContent: isChosen ? `${name} · now` : name });
  const rates = [expected, measured].map((rate) => element("td", { textContent: rate ? rate.toFixed(0) : "–" }));
  return element("tr", { className: isChosen ? "now" : "" }, [head, share, ...rates]);
}
