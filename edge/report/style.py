"""The one style sheet of all pages: one column on a phone, where tables become cards; light and dark."""

CHART = """
:root {
  color-scheme: light dark;
  --ink: #1c2024; --soft: #5b6470; --line: #dfe3e8; --ground: #f7f8fa; --card: #ffffff;
  --accent: #1f5fbf; --tint: #eaf1fc;
  --c1: #2166c4; --c2: #d1650b; --c3: #23875a; --c4: #868b94; --c5: #8a4fbf; --c6: #b3261e; --c7: #00838f;
  --c8: #7a6a00; --c9: #c2418a;
}
@media screen and (prefers-color-scheme: dark) {
  :root {
    --ink: #e7e9ec; --soft: #a0a8b3; --line: #30363d; --ground: #111418; --card: #1a1e24; --accent: #82b1ff;
    --tint: #17253c;
    --c1: #6ea8fe; --c2: #ffa45c; --c3: #5bc796; --c4: #7d838d; --c5: #c39bf2; --c6: #f2867f; --c7: #4dd0e1;
    --c8: #d9c755; --c9: #f08cc0;
  }
}
.ground { fill: var(--card) }
.chart, .chart svg { overflow: visible }
.chart { color: var(--ink); stroke-linejoin: round }
.chart text { fill: currentColor; font: 12px/1 system-ui, sans-serif; font-variant-numeric: tabular-nums }
.chart .title { font-size: 15px; font-weight: 600 }
.chart .label { fill: var(--soft) }
.chart .grid { stroke: var(--line) }
.chart .axis { stroke: var(--soft) }
.chart .flat * { vector-effect: non-scaling-stroke }
.chart .mark { stroke: var(--card) }
"""

STYLE = (
    CHART
    + """
* { box-sizing: border-box }
body { margin: 0; background: var(--ground); color: var(--ink); font: 16px/1.5 system-ui, sans-serif;
  -webkit-text-size-adjust: 100%; overflow-wrap: anywhere }
main { max-width: 78rem; margin: 0 auto; padding: 1.25rem 1rem 3rem }
h1 { font-size: clamp(1.5rem, 5vw, 2.1rem); line-height: 1.2; margin: 0 }
h2 { font-size: 1.2rem; margin: 0 0 .75rem }
h3 { font-size: .95rem; margin: 0 0 .25rem; font-weight: 600 }
p { margin: 0 }
.eyebrow { color: var(--soft); font-size: .85rem; margin-bottom: .25rem }
.on { color: var(--soft); margin: .25rem 0 1rem }
.verdict { background: var(--tint); border-left: 4px solid var(--accent); border-radius: .5rem; padding: .9rem 1.1rem }
.chip { color: var(--accent); font-weight: 600; font-size: .85rem; margin-bottom: .25rem }
.sentence { font-size: clamp(1.05rem, 3.2vw, 1.25rem); line-height: 1.45 }
.sentence + .sentence { margin-top: .6rem }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .75rem; margin: 1rem 0 }
.card { background: var(--card); border: 1px solid var(--line); border-radius: .6rem; padding: .7rem .9rem }
.what, .known { color: var(--soft); font-size: .82rem }
.figure { font-size: 1.3rem; font-weight: 650; line-height: 1.3; overflow-wrap: normal }
main > section { margin-top: 2rem }
main > .cards, header + section { margin-top: 1rem }
.advice { list-style: none; margin: 0; padding: 0; display: grid; gap: .6rem }
.advice code { display: block; margin-top: .2rem; background: var(--card); border: 1px solid var(--line);
  border-radius: .4rem; padding: .4rem .6rem; font: .88rem/1.4 ui-monospace, monospace }
.pictures { display: flex; flex-wrap: wrap; gap: .75rem; margin-bottom: .75rem }
figure { flex: 1 1 min(27rem, 100%); margin: 0; background: var(--card); border: 1px solid var(--line);
  border-radius: .6rem; padding: .7rem .8rem 2.6rem; min-width: 0 }
.threes figure { flex-basis: min(21rem, 100%) }
figcaption { font-size: .95rem; font-weight: 600 }
.key { display: flex; flex-wrap: wrap; gap: .1rem 1rem; margin-top: .2rem; font-size: .8rem }
.key span { display: flex; align-items: baseline; gap: .35rem }
.key svg { flex: none; position: relative; top: 1px }
svg.chart { display: block; margin-top: 1.6rem }
.wide { overflow-x: auto; background: var(--card); border: 1px solid var(--line); border-radius: .6rem }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; width: 100% }
th, td { padding: .4rem .7rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line) }
tbody tr:last-child td { border-bottom: 0 }
th { color: var(--soft); font-weight: 500; white-space: normal; overflow-wrap: normal; vertical-align: bottom }
th.word, td.word { text-align: left }
th.word:first-child, td.word:first-child { position: sticky; left: 0; background: var(--card) }
@media (max-width: 40rem) {
  main { padding: 1rem .75rem 3rem }
  thead { display: none }
  table, tbody { display: block; font-size: .85rem }
  tr { display: grid; grid-template-columns: 1fr 1fr; gap: 0 .8rem; padding: .5rem .6rem;
    border-bottom: 1px solid var(--line) }
  tbody tr:last-child { border-bottom: 0 }
  td { display: flex; justify-content: space-between; align-items: baseline; gap: .3rem; min-width: 0;
    padding: .1rem 0; border: 0; white-space: normal; overflow-wrap: normal }
  td::before { content: attr(data-label); color: var(--soft); font-size: .8rem; text-align: left; min-width: 0;
    overflow-wrap: break-word }
  td.word { font-weight: 600; overflow-wrap: anywhere }
  td:first-child:not(:has(+ .word)) { grid-column: 1 / -1; justify-content: flex-start; font-weight: 600 }
  td.word::before { content: none }
}
.note { color: var(--soft); font-size: .82rem; margin-top: .5rem; max-width: 48rem }
details { margin-top: .4rem }
.wide + h3, details + h3 { margin-top: 1.1rem }
summary { cursor: pointer; color: var(--accent); font-size: .9rem; padding: .3rem 0 }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .3rem 1rem; margin: 0; font-size: .9rem }
dt { color: var(--soft) }
dd { margin: 0 }
@media print {
  body { background: none; font-size: 10pt }
  h2, h3 { break-after: avoid }
  figure, tr, .card, .verdict { break-inside: avoid }
  summary { list-style: none; color: var(--ink); font-weight: 600; break-after: avoid }
  .wide { overflow: visible }
  th, td { white-space: normal; overflow-wrap: break-word; padding: .2rem }
  table { font-size: 8pt }
  details::details-content { content-visibility: visible; display: block }
}
"""
)
