// The texts that tokenizer vectors are made of: written ones and seeded random ones.

// Deterministic random numbers (mulberry32).
export function random(seed) {
  let state = seed >>> 0;
  const next = () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let t = state;
    t = Math.imul(t ^ (t >>> 15), t | 1);
    t ^= t + Math.imul(t ^ (t >>> 7), t | 61);
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  };
  const below = (n) => Math.floor(next() * n);
  const pick = (list) => list[below(list.length)];
  const string = (parts, low, high) => {
    let out = '';
    for (let n = low + below(high - low + 1); n > 0; --n) out += pick(parts);
    return out;
  };
  return { next, below, pick, string };
}

export const scripts = [
  'Falsches Üben von Xylophonmusik quält jeden größeren Zwerg. Straße, STRASSE, ẞ.',
  'Voix ambiguë d’un cœur qui, au zéphyr, préfère les jattes de kiwis ; l\'été, où ça ?',
  'El pingüino Wenceslao hizo kilómetros bajo exhaustiva lluvia. ¿Qué? ¡Añoraba!',
  'Pchnąć w tę łódź jeża lub ośm skrzyń fig. Příliš žluťoučký kůň úpěl ďábelské ódy.',
  'Tiếng Việt: Quốc ngữ có nhiều dấu phụ — ấ ầ ẩ ẫ ậ, ứ ừ ử ữ ự, ở ỡ ợ.',
  'Pijamalı hasta yağız şoföre çabucak güvendi. İstanbul, ISPARTA, ılık, iğne.',
  'Съешь же ещё этих мягких французских булок, да выпей чаю. Йод, ёлка, їжак, ґанок.',
  'Ξεσκεπάζω την ψυχοφθόρα βδελυγμία. ᾧ ὁ ἄνθρωπος ἐν ἀρχῇ ἦν ὁ λόγος. Ώ ΐ ΰ',
  'نص حكيم له سر قاطع وذو شأن عظيم مكتوب على ثوب أخضر. مُحَمَّد ١٢٣٤٥ ۰۱۲۳',
  'دیوانه‌ای در شهر می‌خواند؛ پژوهش و گچ و چای. یک ۱ دو ۲',
  'דג סקרן שט בים מאוכזב ולפתע מצא חברה. בְּרֵאשִׁית בָּרָא אֱלֹהִים',
  'ऋषियों को सताने वाले दुष्ट राक्षसों का सर्वनाश करने वाले। क़ ख़ ड़ क्षत्रिय १२३',
  'আমার সোনার বাংলা, আমি তোমায় ভালোবাসি। ড় ঢ় য় কো কৌ ১২৩',
  'ਮੈਂ ਪੰਜਾਬੀ ਬੋਲਦਾ ਹਾਂ। ਸ਼ ਖ਼ ਗ਼', 'ગુજરાતી ભાષા, ૧૨૩', 'ଓଡ଼ିଆ ଭାଷା ଡ଼ ଢ଼ କୋ',
  'யாமறிந்த மொழிகளிலே தமிழ்மொழி போல் இனிதாவது எங்கும் காணோம். கொ கோ கௌ ௧௨௩',
  'తెలుగు దేశ భాషలందు లెస్స. కై ౧౨౩', 'ಕನ್ನಡ ಕಲಿ, ಕೊ ಕೋ ೧೨೩', 'മലയാളം അക്ഷരങ്ങൾ, കൊ കോ ൧൨൩', 'සිංහල කො කෝ ෴',
  'เป็นมนุษย์สุดประเสริฐเลิศคุณค่า กว่าบรรดาฝูงสัตว์เดรัจฉาน น้ำ ๑๒๓๔', 'ພາສາລາວ ນ້ຳ ໑໒໓', 'မြန်မာဘာသာ ဦး ၁၂၃',
  'ភាសាខ្មែរ គឺជាភាសា ១២៣', 'བོད་སྐད་ ཀྵ ༡༢༣', 'ქართული ენა ႠႡႢ ᲐᲑᲒ', 'Հայերեն լեզու և ﬓ', 'አማርኛ ፩፪፫ ሰላም', 'ᐃᓄᒃᑎᑐᑦ ᏣᎳᎩ ꮳꮃꭹ',
  '我能吞下玻璃而不伤身体。我能吞下玻璃而不傷身體。二〇二六年三月,ＡＢＣ１２３。', '𠀀𠮷野家で牛丼を食べる。𪜀 𫝀 𬺰 豈 更 車 喝 侮 﨎 﨏',
  'いろはにほへと ちりぬるを。カタカナ ｶﾞｷﾞｸﾞ ガギグ パピプ ヴ ㍿ ㌔ ①②③', '다람쥐 헌 쳇바퀴에 타고파. 한글 각 힣 ㄱㄴㄷ ㅏㅑ',
  '\u1112\u1161\u11ab\u1100\u1173\u11af \u1100\u1161\u11a8 \uac00\u11a8 \u1100\u1161\u1100\u1161 \ua960\u1160 \ud7b0\ud7cb \u1100\u11a8',
  'Монгол хэл ᠮᠣᠩᠭᠣᠯ ᠪᠢᠴᠢᠭ\u180e ᠠ', 'ᚠᛇᚻ ᛒᛦᚦ ᚠᚱᚩᚠᚢᚱ 𐌰𐌱𐌲 𐍈 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝟎𝟏𝟐 𝐱²+𝐲³ ½ ¾ Ⅷ ⅻ ⁴₅ ₙ ª º',
];

export const marks = [
  'e\u0301 a\u030a o\u0302\u0323 o\u0323\u0302 \u00f4\u0323 s\u0307\u0323 q\u0307\u0323 A\u030a\u0301 \u212b \u2126 \u2000\u2001 \u0344 \u0340\u0341\u0343',
  'Z\u0351\u036b\u0343\u032a\u0302\u036b\u033d\u034f\u0334\u0319\u0324\u031e\u0349\u035a\u032f\u031e\u0320\u034dA\u036b\u0357\u0334\u0362\u0335\u031c\u0330\u0354L\u0368\u0367\u0369\u0358\u0320G\u0311\u0357\u030e\u0305\u035b\u0341\u0334\u033b\u0348\u034d\u0354\u0339O\u0342\u030c\u030c\u0358\u0328\u0335\u0339\u033b\u031d\u0333!',
  '\u0301\u0302\u0323', ' \u0301x', '1\u0301 2\u0323\u0307', '\n\u0301\n', 'a\u0315\u0300\u05ae\u0316b', '\u0915\u093c\u094d \u0928\u093c \u09c7\u09be \u0b47\u0b56 \u0dd9\u0dcf\u0dca',
  '\u1b06 \u1b05\u1b35 \u102e\u1025 \u1025\u102e', '\u0374 \u037e \u0387 \u1fef \u1ffd \u00b7 \u2329 \u232a', '\ufb1d \ufb2a \ufb49 \u05e9\u05bc\u05c1', '\ud834\udd5e \ud834\udd58\ud834\udd65 \ud804\udc9a \ud804\udc99\ud804\udcba',
  '\u3099か か\u3099 ウ\u3099 は\u309a \u304b\u3099\u309a', '\u2adc \u2add\u0338 =\u0338 <\u0338 >\u0338 \u226e \u220b\u0338', '\u20dd\u20de a\u20dd 1\u20e3', 'i\u0307\u0301 \u0130 \u0131\u0307', '\u1e69 s\u0323\u0307 \u1e0b\u0323 \u1e9b\u0323',
];

export const emoji = [
  '👍 👍🏽 👩‍💻 👨‍👩‍👧‍👦 🏳️‍🌈 🏴‍☠️ 🇩🇪🇫🇷 ☺️ ☺ ❤️‍🔥 1️⃣ #️⃣ ©️ ™️', '🤷🏿‍♀️🧑🏻‍❤️‍💋‍🧑🏼🫠🫶🏾🪿', '🏴󠁧󠁢󠁳󠁣󠁴󠁿', 'a👍b', ' 😀 😃  😄', '😀😃😄😁😆', '\u200d\ufe0f\u200b\u200e\u2060\ufeff', '✨code✨', '→ ← ⇒ ∑∏∫√∞≠≤ ≥', '—–‐‑…“”‘’«»', '€£¥₿ ₹', '♠♣♥♦ ♪♫', '█▓▒░ ┌─┐│└┘', '\ufffd\ufffe\uffff', '\ue000\uf8ff\udb80\udc00',
];

export const contractions = (() => {
  const out = [];
  for (const tail of ['s', 't', 're', 've', 'm', 'll', 'd', 'S', 'T', 'RE', 'Ve', 'M', 'lL', 'D', '\u017f', 'x', 'r', 'l', '']) {
    for (const head of ['it', ' IT', '', ' ', '1', '\n', 'é', 'e\u0301', '我']) out.push(`${head}'${tail} y`, `${head}\u2019${tail}z`, `${head}''${tail}`, `${head}'${tail}${tail}`);
  }
  return out;
})();

export const code = [
  'def fib(n: int) -> int:\n    """n-th number."""\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a\n\n\nif __name__ == "__main__":\n    print([fib(i) for i in range(10)])\n',
  'class Foo(Base):\r\n\tdef __init__(self, *args, **kwargs):\r\n\t\tsuper().__init__(*args, **kwargs)\r\n\t\tself._x = kwargs.get("x", 0x1F)  # hex\r\n',
  '#include <vector>\ntemplate <typename T>\nstd::vector<T>&& f(const T* p, size_t n) {\n  for (size_t i = 0; i < n; ++i) { out[i] |= p[i] << 3; }\n  return std::move(out);  // done\n}\n',
  'const f = async (x) => ({...x, y: `${x?.y ?? 1}`});\n\n\n/* c */ let re = /^\\s+(?!\\S)$/gu;', '{"a": [1, 2.5e-10, true, null], "b": {"c\\u00e9": "\\n"}}', 'SELECT * FROM t WHERE a <> \'x\' AND b >= 10;--',
  'for f in *.txt; do echo "${f%.txt}" | sed -e \'s/[^a-z]//g\' >> /dev/null 2>&1; done', '<div class="a b">\n  <p>Hello,&nbsp;world!</p>\n</div>', 'x=1;y=2;;z==3!=4&&5||6', 'foo_bar FooBar fooBar FOO_BAR foo-bar foo.bar()', 'https://example.com/a/b?c=d&e=%20f#g', 'user@example.org', 'C:\\Users\\me\\x.txt', '1,234,567.89 3.14159 1e10 0b1011 v1.2.3-rc4 2026-03-01T12:00:00Z', '```python\nprint("hi")\n```\n\n- item\n  - sub\n\n> quote\n\n| a | b |\n|---|---|\n', '\\frac{a}{b} $\\alpha^2$ \\\\', '!!!???... ---===--- ###',
];

// `added` are the contents of the added tokens.
export function lookAlikes(added) {
  const out = [];
  for (const token of added) {
    out.push(token, ` ${token} `, `a${token}b`, `${token}${token}`, `\n${token}\n`, `<${token}>`, token.slice(0, -1), token.slice(1), token.toUpperCase(), token.replace('|', '||'), `${token.slice(0, -1)}\u200b${token.slice(-1)}`,
      // The mark joins the last character, but only after the token was split off.
      `${token}\u0338`, `e${token}\u0301`, `x ${token.slice(0, 3)}${token}${token.slice(-3)} y`, `1${token}\u3000`, `\r${token}  ${token}\t`);
  }
  out.push('<|', '|>', '<||>', '<|im_|>', '<|im_start', '＜|im_end|＞', '<|im_end|', '<|im_end|\u0338>', '<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nHi!<|im_end|>\n', '<<|im_end|>', '<think><|im_end|></think>');
  return out;
}

const whiteSpace = [' ', ' ', '  ', '\t', '\n', '\r', '\r\n', '\n\n', '\u00a0', '\u3000', '\u000b', '\u000c', '\u0085', '\u2028', '\u2029', '\u2003', '\u200a', '\u202f', '\u205f', '\u1680', '\u180e', '\u200b', '\ufeff', '\u001c', '\u001f'];

export function whiteSpaceTexts(rng, count) {
  const out = [];
  for (let i = 0; i < count; ++i) out.push(rng.string([...whiteSpace, 'a', 'bc', '1', '!', '\u0301', 'é', '我'], 1, 12));
  for (const space of whiteSpace) for (const n of [1, 2, 3, 7, 16, 33]) out.push(space.repeat(n), `x${space.repeat(n)}y`, `${space.repeat(n)}.`, `.${space.repeat(n)}\n7`);
  return out;
}

// Blocks (first, last) that random characters come from.
const blocks = [
  [0x00, 0x7f], [0x00, 0x7f], [0x80, 0xff], [0x100, 0x24f], [0x250, 0x36f], [0x300, 0x36f], [0x370, 0x52f], [0x531, 0x5f4], [0x600, 0x6ff], [0x700, 0x8ff], [0x900, 0xdff], [0xe00, 0x109f], [0x10a0, 0x11ff], [0x1200, 0x139f],
  [0x13a0, 0x17ff], [0x1800, 0x1cff], [0x1d00, 0x1fff], [0x2000, 0x23ff], [0x2400, 0x2bff], [0x2c00, 0x2fff], [0x3000, 0x33ff], [0x3400, 0x9fff], [0x4e00, 0x9fff], [0xa000, 0xabff], [0xac00, 0xd7ff], [0xe000, 0xf8ff], [0xf900, 0xffff],
  [0x10000, 0x103ff], [0x10400, 0x1049f], [0x12000, 0x1239f], [0x13000, 0x1342e], [0x1d100, 0x1d1ff], [0x1d400, 0x1d7ff], [0x1f300, 0x1faff], [0x20000, 0x2a6df], [0x2f800, 0x2fa1f], [0xe0000, 0xe01ef], [0xf0000, 0x10ffff],
];
// Letters and marks of Unicode 15 and 16 in those blocks: PCRE2 10.42 has the tables of Unicode 14.
const newer = new Set([0x897, 0xcf3, 0xece, 0x1c89, 0x1c8a, 0xa7cb, 0xa7cc, 0xa7cd, 0xa7da, 0xa7db, 0xa7dc]);

// `nfc` is the normalizer that answers. Its tables are old: a mark that it does not know as one is left out, which
// shows where it orders marks otherwise than Node does.
export function fuzzTexts(rng, count, nfc) {
  const usable = (c) => {
    if (newer.has(c)) return false;
    const ch = String.fromCodePoint(c);
    return [`a\u0315${ch}`, `a${ch}\u0316`, ch.normalize('NFD')].every((s) => nfc(s) === s.normalize('NFC'));
  };
  const character = () => {
    for (;;) {
      const [first, last] = rng.pick(blocks);
      const c = first + rng.below(last - first + 1);
      if ((c < 0xd800 || c > 0xdfff) && usable(c)) return String.fromCodePoint(c);
    }
  };
  const out = [];
  for (let i = 0; i < count; ++i) {
    let s = '';
    for (let n = 1 + rng.below(24); n > 0; --n) s += rng.next() < 0.2 ? rng.pick([' ', '\n', 'the', '\'s', '12', '\u0323', '\u0301', 'é', '.']) : character();
    out.push(s);
  }
  return out;
}

// Bytes that are not UTF-8.
export function brokenTexts(rng, count) {
  const out = ['80', 'ff', 'c3', 'e2', 'e282', 'f09f98', 'c0af', 'e080af', 'eda080edb080', 'f4908080', 'f8888080', '61c362', 'e28261', 'f09f9861', 'f09ff09f9880', '41c0af42', 'e1a0e1a080', '6180626380', 'efbfbd80', 'c328', '3c7cff7c3e', '3c7c696d5f656e647cc33e', '0000ff00'].map((h) => Buffer.from(h, 'hex'));
  for (let i = 0; i < count; ++i) {
    const bytes = Buffer.from(rng.string([...scripts, ...emoji], 1, 1).slice(0, 16));
    for (let n = 1 + rng.below(4); n > 0; --n) bytes[rng.below(bytes.length)] = rng.below(256);
    out.push(bytes.subarray(rng.below(3), bytes.length - rng.below(3)));
  }
  return out;
}
