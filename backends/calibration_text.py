"""A few hundred tokens of prose, code, tables and other languages, by which engines learn a model's ranges."""

TEXT = """The harbour was quiet when the ferry came in. Two men threw ropes to the quay, and a woman with a red \
suitcase asked them how far it was to the station. "Ten minutes, if you walk along the water," said the older \
one. "Less, if you run; the last train leaves at 21:45." She thanked him and ran.

# How to bake bread
1. Mix 500 g of flour, 350 ml of water, 10 g of salt and 5 g of yeast.
2. Let the dough rest for 90 minutes at about 24 °C, then fold it four times.
3. Bake it at 240 °C for 35–40 minutes; the crust should be dark brown.

def mean(values: list[float]) -> float:
    \"\"\"The average; 0.0 for an empty list.\"\"\"
    return sum(values) / len(values) if values else 0.0

for (int i = 0; i < n; ++i) { total += prices[i] * counts[i]; }
SELECT name, COUNT(*) FROM orders WHERE year = 2021 GROUP BY name ORDER BY 2 DESC;
<p class="note">Tables &amp; figures are at <a href="https://example.org/data.json">the end</a>.</p>

Question: If a train travels 180 kilometres in two and a half hours, what is its average speed?
Answer: 180 / 2.5 = 72, so it travels at 72 kilometres per hour.

In economics, the price of a good tends to rise when demand grows faster than supply. Governments have sometimes \
tried to hold prices down by law; shortages, queues and black markets were the usual result. Others paid \
subsidies instead, which shifted the cost to everybody who pays taxes. Neither remedy is free of harm, and \
historians still disagree about which did more of it during the 1970s.

Le lendemain, il pleuvait encore. Die Kinder spielten trotzdem im Garten. Mañana será otro día. Сегодня хорошая \
погода. 今日は天気がいいです。 今天天气很好。 \U0001f600 naïve café — “quoted”, ‘single’, … and so on!

DEAR SIR OR MADAM, I am writing to complain about the noise from the building site opposite our office. It \
starts before six in the morning, it does not stop for lunch, and on Tuesday it broke one of our windows. Please \
tell me whom I should send the bill to. Yours faithfully, J. K. Okonkwo (Ms), +44 20 7946 0018, room 3.14, ref. \
#A-7731/b

The cell is the smallest unit of life. Plants capture sunlight in chloroplasts and store its energy as sugar; \
animals eat the plants, and mitochondria turn the sugar into ATP, which powers almost everything that a cell \
does: building proteins, pumping ions across membranes, moving, dividing. When too little oxygen reaches a \
muscle, its cells fall back on fermentation, and lactate builds up. It used to be blamed for sore legs, wrongly, \
as it is gone within the hour.
"""
