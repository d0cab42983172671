// Writes tokenizer vectors, one JSON object a line, as answered by the Hugging Face tokenizers library.
//   npm install --ignore-scripts && node make-tokenizer-vectors.mjs CHECKPOINT_FOLDER all|some > FILE
// Encoding: {"text" or "hex" (bytes that are not UTF-8), "ids" (added tokens as text), "parsed" (added tokens parsed;
// absent when equal to ids)}; {"segments": [[text, parsed?]...], "ids"}. Decoding: {"decode": ids, "keep", "drop"}.
import fs from 'node:fs';
import { createRequire } from 'node:module';
import * as texts from './tokenizer-texts.mjs';

const { Tokenizer } = createRequire(import.meta.url)('@anush008/tokenizers');
const [folder, size] = process.argv.slice(2);
if (!folder || !['all', 'some'].includes(size)) throw new Error('usage: CHECKPOINT_FOLDER all|some');
const scale = size === 'all' ? 1 : 0.4;

const json = JSON.parse(fs.readFileSync(`${folder}/tokenizer.json`, 'utf8'));
const withAdded = Tokenizer.fromString(JSON.stringify(json));
const withoutAdded = Tokenizer.fromString(JSON.stringify({ ...json, added_tokens: [] }));
const added = json.added_tokens.map((t) => t.content);
const encode = async (tokenizer, text) => (text === '' ? [] : (await tokenizer.encode(text, null, { addSpecialTokens: false })).getIds());
const print = (line) => process.stdout.write(JSON.stringify(line) + '\n');
const normalizer = withAdded.getNormalizer();
const rng = texts.random(20260301);
const some = (n) => Math.round(n * scale);

// ---- encoding
const plain = new Set(['', ...texts.marks, ...texts.emoji, ...texts.contractions, ...texts.code, ...texts.lookAlikes(added.slice(0, 8))]);
for (const text of [...texts.scripts, ...texts.marks]) for (const form of [text, text.normalize('NFC'), text.normalize('NFD'), text.normalize('NFKC')]) plain.add(form);
for (const text of texts.whiteSpaceTexts(rng, some(500))) plain.add(text);
for (const text of texts.fuzzTexts(rng, some(1500), (s) => normalizer.normalizeString(s))) plain.add(text);
for (let i = 0; i < some(300); ++i) plain.add(rng.string(['0', '1', '23', '456', '7890', '٣', '५', '五', '½', ' ', '.', ',', 'a'], 1, 12));
for (let i = 0; i < some(400); ++i) plain.add(rng.string([...added, '<', '|', '>', 'im_end', '<|im_', ' ', '\n', 'a', 'é', '\u0301', '\u0338'], 1, 8));
// Whole tokens in a row: deep merges, and tokens that are half characters.
const written = Object.keys(json.model.vocab).sort();
const characterOf = [];
for (let byte = 0, next = 256; byte < 256; ++byte) characterOf.push((byte > 32 && byte < 127) || (byte > 160 && byte !== 173) ? byte : next++);
const byteOf = new Map(characterOf.map((character, byte) => [String.fromCodePoint(character), byte]));
const bytesOf = (token) => Buffer.from([...token].map((c) => byteOf.get(c)));
for (let i = 0; i < some(700); ++i) plain.add(Buffer.concat(Array.from({ length: 1 + rng.below(10) }, () => bytesOf(rng.pick(written)))).toString('utf8'));
for (const unit of ['a', ' ', '1', '\n', '\u0301', 'ab', '是', '👍', '\t ', '.', '<', "'s"]) for (const n of [2, 3, 17, 64, 150]) plain.add(unit.repeat(n));
for (const text of plain) {
  // A random text may hold half of a pair; the bindings would make it U+FFFD.
  if (!text.isWellFormed()) continue;
  const ids = await encode(withoutAdded, text);
  const parsed = await encode(withAdded, text);
  print(JSON.stringify(ids) === JSON.stringify(parsed) ? { text, ids } : { text, ids, parsed });
}
for (const bytes of texts.brokenTexts(rng, some(400))) print({ hex: bytes.toString('hex'), ids: await encode(withoutAdded, bytes.toString('utf8')) });

// ---- segments: the written parts of a template parse added tokens, the rest does not
const longestFirst = [...added].sort((a, b) => b.length - a.length);
for (let i = 0; i < some(300); ++i) {
  const segments = [];
  for (let n = 1 + rng.below(6); n > 0; --n) segments.push([rng.string([...added.slice(0, 8), ' ', '\n', 'user', 'it\'s', '<|im_', 'end|>', '\u0301', 'e', ' 12', '  '], 0, 4), rng.next() < 0.5]);
  // Cut by hand at every added token of a run of parsed segments; encode what lies between without added tokens.
  const ids = [];
  let pending = '';
  const flush = async () => { ids.push(...await encode(withoutAdded, pending)); pending = ''; };
  for (let k = 0; k < segments.length;) {
    let run = segments[k][0];
    const parse = segments[k][1];
    for (++k; k < segments.length && (segments[k][1] === parse || segments[k][0] === ''); ++k) run += segments[k][0];
    for (let at = 0; at < run.length;) {
      const token = parse ? longestFirst.find((t) => run.startsWith(t, at)) : undefined;
      if (token === undefined) {
        pending += run[at++];
      } else {
        await flush();
        ids.push(json.added_tokens.find((t) => t.content === token).id);
        at += token.length;
      }
    }
  }
  await flush();
  print({ segments, ids });
}

// ---- decoding
const all = [...Object.values(json.model.vocab), ...json.added_tokens.map((t) => t.id)];
const singleBytes = [...byteOf.keys()].map((c) => json.model.vocab[c]);
for (let i = 0; i < some(800); ++i) {
  const ids = [];
  for (let n = 1 + rng.below(16); n > 0; --n) {
    const kind = rng.next();
    ids.push(kind < 0.5 ? rng.pick(all) : kind < 0.9 ? rng.pick(singleBytes) : rng.pick(json.added_tokens).id);
  }
  print({ decode: ids, keep: await withAdded.decode(ids, false), drop: await withAdded.decode(ids, true) });
}
for (const text of [...texts.scripts, ...texts.emoji]) {
  const ids = await encode(withAdded, text);
  for (const part of [ids, ids.slice(1), ids.slice(0, -1)]) print({ decode: part, keep: await withAdded.decode(part, false), drop: await withAdded.decode(part, true) });
}
