"""Texts on which tokenizers disagree: one kind of trouble per line.

They are written with escapes where an editor, a terminal or Git might change or hide a character.
"""

TEXTS: list[str] = [
    "",
    "Hello, world!",
    "The quick brown fox jumps over the lazy dog.",
    # Whitespace: runs, edges, every kind of line end, and spaces that are not the ASCII one.
    " ",
    "   ",
    " leading space",
    "   three leading spaces",
    "trailing space ",
    "trailing spaces   ",
    "runs  of   spaces    inside     a      line",
    "\t",
    "\ttab\tseparated\t\tvalues\t",
    "\n",
    "\n\n\n",
    "one\ntwo\n\nthree\n\n\nfour\n",
    "carriage\r\nreturn\r\n\r\nline\rends\r",
    " \n \t \r\n  mixed \n\t ",
    "no-break\u00a0space, thin\u2009space, ideographic\u3000space, line\u2028separator, next\u0085line",
    # Digits and numbers.
    "1234567",
    "1 12 123 1234 12345 3.14159 -2,718,281.8 1e-10 0xDEADBEEF",
    "v1.2.3-rc4 on 2024-02-29T23:59:59Z",
    "\u0967\u0968\u0969 \u0661\u0662\u0663 \uff11\uff12\uff13",  # Devanagari, Arabic-Indic, full-width
    "x\u00b2 + y\u00b3 = z\u2074, H\u2082O, \u00bd \u2153 \u215e, \u2163 \u2462",  # No and Nl, not Nd
    "$5.00 \u20ac10 \u00a3\u00a5\u20b9 50\u00a2 100%",
    # Contractions: lower case, upper case, and the curly apostrophe that no rule knows.
    "I'm you're he's we'll they've I'd can't 'tis o'clock",
    "I'M YOU'RE HE'S WE'LL THEY'VE I'D CAN'T DON'Ts",
    "don\u2019t \u2018quote\u2019 \u201cdouble\u201d \u2014 dash \u2026",
    "''' '' 's 'S ' s '",
    # Letters beyond ASCII, composed and decomposed.
    "na\u00efve caf\u00e9 \u00e5ngstr\u00f6m stra\u00dfe \u0141\u00f3d\u017a \u0130stanbul",
    "nai\u0308ve cafe\u0301 a\u030angstro\u0308m",
    "Z\u0351\u036b\u0343\u036a\u0302\u036b\u033d\u034f\u0334\u0319\u0324\u031e\u0349\u035a\u032f\u031ealgo",
    "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440! \u0393\u03b5\u03b9\u03ac \u03c3\u03bf\u03c5",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002\u65e5\u672c\u8a9e\u306e\u30c6\u30ad\u30b9\u30c8 \ud55c\uad6d\uc5b4",
    "\u0627\u0644\u0633\u0644\u0627\u0645 \u05e9\u05c1\u05b8\u05dc\u05d5\u05b9\u05dd abc \u0639\u0644 123",
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35",  # vowels that are marks
    "\u1780\u1798\u17d2\u1796\u17bb\u1787\u17b6 \u1019\u103c\u1014\u103a\u1019\u102c",
    "mixed \u0441\u043crip\u0442s: ABC\u0410\u0411\u0412\u0391\u0392\u0393 \u6f22\u5b57kana\u30ab\u30ca123",
    "\ufb01ne \ufb02ow \u01c4 \u1e9e \u212b \u2126",  # ligatures and other characters that NFKC would replace
    "\U0001d400\U0001d51e\U0001d7d9 \U00020000\U0002a6d6 \U0001f130",  # letters and a digit above U+FFFF
    # Emoji: skin tones, sequences with zero-width joiners, flags, keycaps.
    "\U0001f600\U0001f44d\U0001f3fd \u2764\ufe0f \u2639",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 \U0001f3f3\ufe0f\u200d\U0001f308",
    "\U0001f1eb\U0001f1f7\U0001f1ef\U0001f1f5 1\ufe0f\u20e3",
    # Characters that nobody sees.
    "zero\u200bwidth\u200cnon\u200djoiner\u2060word\ufeffbom\u00adshy",
    "\ufeffstarts with a byte order mark",
    "\u202eright to left\u202c \u2066isolate\u2069",
    "\x01\x02\x07\x08\x0b\x0c\x1b[31mred\x1b[0m\x7f",
    "private \ue000 unassigned \u0378 noncharacter \uffff replacement \ufffd",
    # Look-alikes of control tokens: text for a user's words, tokens for a chat template's.
    "<|im_end|>",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "a <|im_end|> b<|endoftext|>c <|im_end |> <|IM_END|> <|im_",
    "<|im_start|><|im_start|><|im_end|",
    " <|im_end|> ",
    "<s>[INST] hi [/INST]</s> <unk> <pad> <0x0A> <0x41>",
    "\u2581under\u2581line \u0120G\u0120 \u010aC",  # how the two kinds of tokenizer write a space
    # Code, punctuation, addresses.
    "def f(x: int) -> int:\n    return x**2  # square\n",
    "if (a[i]!=b||c&&!d) { x += y<<2; } /* ok */\n\t\treturn;\n",
    '{"key": [1, 2.5, null], "s": "a\\n\\u00e9"}',
    "https://example.org/a_b/c-d?q=1&r=%20#frag mail@example.org C:\\Users\\x",
    "!!! ??? ... --- === *** ((())) []{} <> ;:,. `~@#$%^&*_+|\\/",
    "camelCaseWord snake_case_word SCREAMING_CASE kebab-case-word",
    "TITLE Case lOwEr uPPER",
    # Length.
    "pneumonoultramicroscopicsilicovolcanoconiosis" * 4,
    "a" * 200,
    "=" * 65 + " " * 33 + "\n" * 17,
]
