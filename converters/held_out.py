"""A thousand tokens of prose, code, lists and other languages, on which edge evaluates the models that it makes. They
are held out: calibration reads other texts."""

TEXT = """Grandmother's clock had stopped on the night of the flood, and none of her sons dared to wind it again. \
When Marta inherited the house she opened the case, found a nest of dry mud among the wheels, and laughed until her \
brother came running from the barn.

Before you leave on a long hike:
- fill two bottles, even in winter;
- tell a neighbour which valley you mean to cross;
- pack a whistle, matches and a dry pair of socks.

fn largest(values: &[i64]) -> Option<i64> {
    let mut best = *values.first()?;
    for &value in values {
        if value > best { best = value; }
    }
    Some(best)
}

Der Bäcker öffnete um fünf, doch das Brot war längst verkauft. Le facteur monta l'escalier sans bruit et glissa la \
lettre sous la porte. El gato negro dormía encima del piano. Поезд опоздал на сорок минут. 駅前の店は\
八時に閉まります。 我昨天买了三本书。

Customer: The lamp I ordered arrived with a cracked shade. Can you send a new one?
Agent: I am sorry about that. May I have the order number, please?
Customer: It is 58-20417, from the ninth of March.
Agent: Thank you. A replacement shade leaves our warehouse tomorrow, and you may keep the damaged one.

Volcanic soils are fertile because fresh ash weathers quickly and releases potassium, calcium and phosphorus. Farmers \
on the slopes of Etna have planted lemons and vines between lava flows for centuries, although every generation has \
lost a few orchards. Seismologists now watch the mountain with tiltmeters, gas sensors and satellites; a swelling of \
a few centimetres is often the first warning, weeks before the ground begins to tremble.

import json

def load_settings(path, defaults=None):
    settings = dict(defaults or {})
    try:
        with open(path, encoding="utf-8") as handle:
            settings.update(json.load(handle))
    except FileNotFoundError:
        print(f"{path} is missing, using {len(settings)} defaults")
    return settings

| city   | founded | bridges | rain (mm) |
|--------|--------:|--------:|----------:|
| Porto  |    1123 |       6 |     1,147 |
| Bergen |    1070 |      14 |     2,495 |
| Aswan  |       - |       2 |         1 |

Problem. A rectangular garden is 4 metres longer than it is wide, and its area is 96 square metres. How long is the \
fence around it? Solution. If the width is w, then w(w + 4) = 96, so w² + 4w − 96 = 0 and w = 8, since a width cannot \
be negative. The sides are 8 and 12 metres, and the fence measures 2 · (8 + 12) = 40 metres.

{"id": 7041, "status": "shipped", "items": [{"sku": "KB-88", "count": 2, "price": 34.50}], "notes": null}

Minutes of the tenants' meeting, 14 October. Present: eleven households. The treasurer reported a surplus of 312 \
euros. It was agreed to repair the gutter before November, to replace the bulbs in the cellar, and to ask the \
landlord once more about the lift, which has been out of order since the summer. Mr Albrecht objected to bicycles in \
the hallway; a vote was postponed.

Parliaments did not grow out of a theory. Kings who needed money for a war summoned those who had it, and those who \
came asked for something in return. In some countries the bargain became a habit, then a right; in others the king \
found silver elsewhere and sent everyone home. What looks like a principle in the constitution was, more often than \
teachers admit, what a lost campaign had cost.

$ git log --oneline -n 3
9f31c2e Close sockets when a client hangs up
41ab077 Sort results by date instead of by name
c03d9d8 Drop support for the old archive format

Dear Ms Lindqvist, your application for the position of assistant librarian reached us in time, and we read it with \
pleasure. Would Thursday the 21st at half past ten suit you for a conversation? Please bring the certificates that \
you mention. The entrance is at the back of the building while the front steps are being repaired.

"You said the boat would hold six." "I said it would float with six. Holding them is another matter." She looked at \
the water, which was the colour of slate, and then at the children, who were already arguing over the oars.
"""
