"""Some 250 strings that between them meet every branch of the pre-tokenizers in use, the same on every run."""

# ruff: noqa: E501

from __future__ import annotations

import random

HAND_WRITTEN = [
    "", " ", "  ", "   ", "\t", "\n", "\n\n", "\n\n\n", "\r\n", "\r", " \n", "\n ", " \n\n ", "\t\n", "\n =", "    x",
    "a", "A", "é", "e\u0301", "ß", "İ", "ı", "ﬁ", "½", "²", "Ⅷ", "٣", "१२३", "𝟘𝟙𝟚", "你", "你好，世界！", "こんにちは世界",
    "カタカナ ひらがな 漢字", "안녕하세요 세계", "สวัสดีชาวโลก", "नमस्ते दुनिया", "নমস্কার", "مرحبا بالعالم", "שלום עולם",
    "Привет, мир!", "Γειά σου Κόσμε", "Xin chào thế giới", " Việt Nam", "Zażółć gęślą jaźń", "Übergrößenträger",
    "L'été à l'école", "naïve café", "Ça va?", "façade", "ĳsland", "Ǆ ǅ ǆ",
    "Hello world", " Hello world", "Hello  world", "Hello   world  ", "Hello, world!", "Hello,y'all! How are you 😁 ?我想在apple工作1314151天～",
    "The quick brown fox jumps over the lazy dog.", "I'm, you're, he's, we'll, they'd, I've, don't", "I'M YOU'RE HE'S WE'LL",
    "it's 'quoted' ''double'' '''triple'''", "'s 't 're 've 'm 'll 'd", "'S 'T 'RE", "o'clock rock'n'roll", "’s curly ’ll",
    "0", "1", "12", "123", "1234", "12345", "123456789", "3.14159", "1,000,000", "1e-10", "0xFF", "v1.2.3-rc4", "2026-11-30T09:38:41Z",
    "$1,234.56 €99 £5 ¥1000", "100%", "50°C", "x² + y² = z²", "a+b=c", "a<b>c", "if(x==1){return;}", "!!!", "???!!!", "...", "…",
    "--", "---", "—", "–", "===", "=====", "######", "*****", "~~~~", "^^^", "```", "||", "&&", "//", "/* c */", "<!-- x -->", "\\n", "\\\\",
    "def f(x):\n    return x + 1\n", "for i in range(10):\n\tprint(i)\n", "#include <stdio.h>\nint main(void) { return 0; }\n",
    "SELECT * FROM t WHERE a = 'b' AND c >= 10;", '{"key": [1, 2.5, null, true], "s": "\\u00e9"}', "<div class=\"a\">text</div>",
    "https://example.org/path?q=1&r=two#frag", "user.name+tag@example.co.uk", "C:\\Users\\me\\file.txt", "/usr/local/bin/python3",
    "snake_case_name camelCaseName PascalCase SCREAMING_CASE kebab-case", "HTTPServer2XMLParser", "ABCdefGHI", "aBcDeF", "iPhone15ProMax",
    "🙂", "😀😃😄", "👩‍👩‍👧‍👦", "👍🏽", "🇫🇷🇯🇵", "❤️", "🚀 (normal) 😶‍🌫️ (multiple emojis concatenated) ✅", "a😀b", " 😀 ", "☃", "♠♣♥♦", "→←↑↓", "∑∫√∞",
    "\u200b", "a\u200bb", "\u00a0", "a\u00a0b", "\u3000", "a\u3000b", "\ufeff", "\u2028", "\u2029", "\u0085", "\u000b", "\u000c", "\u0000", "\u0001\u0002", "\u007f", "\ufffd",
    "\u0300", "a\u0300\u0301\u0302", "Z̸̢̛a̵͓l̶̡g̷o̴", "ﷺ", "𐍈", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢", "＜ｆｕｌｌｗｉｄｔｈ＞１２３", "ｱｲｳ", "㍿", "①②③", "ªº", "µ", "K", "Å",
    "<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<bos>", "<eos>", "[INST]", "[/INST]", "<|begin_of_text|>", "<｜begin▁of▁sentence｜>",
    "▁", "▁▁", "a▁b", "Ġ", "Ċ", "ø ö ú ÿ õ ÷", "<0x0A>", "<0xE2>", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "                                 ", "\t\t\t\t", "\n \n  \n   \n",
    "abc\n\n\n\ndef   \n ghi\r\n\r\njkl", "x " * 20, "ab" * 30, "1 " * 15, "end.  ", "  start", "Mixed 中文 and English 混在 text と日本語",
]  # fmt: skip

ALPHABETS = (
    "abcdefghijklmnopqrstuvwxyz  ",
    "ABCabc012 .,'\n",
    "éèüßñøå aeiou",
    "привет мир ",
    "的一是不了人我在有他这中大来上国 ",
    "あいうえおアイウエオ漢字 ",
    "😀🚀👍🏽❤️☃ ",
    " \t\n\r\u00a0",
    "0123456789.,-+ ",
    "()[]{}<>|&^%$#@!~`'\"\\/;:?=_ ",
    "안녕하세요 세계",
    "مرحبا 123 ",
)


NUM_RANDOM = 50


def diverse_strings() -> list[str]:
    """The hand-written strings, then random ones of a fixed seed."""
    rng = random.Random(20261130)
    strings = list(HAND_WRITTEN)
    for _ in range(NUM_RANDOM):
        alphabet = "".join(rng.sample(ALPHABETS, 2))
        strings.append("".join(rng.choice(alphabet) for _ in range(rng.randint(1, 60))))
    return strings
