//! The tiny golden checkpoints, layer by layer, state by state, and draft by draft.

use std::path::{Path, PathBuf};

use ninfer_core::DType;
use ninfer_core::backend::Backend;
use ninfer_core::model::{CausalModel, LaneOptions, PrefillEnd, RoundRow};
use ninfer_core::segment::{Batch, PAGE_TOKENS, Profile, Segment};
use ninfer_core::state::Committed;
use ninfer_core::view::View;
use ninfer_kernels::cpu::Cpu;
use safetensors::SafeTensors;

use super::tail::{DraftSegments, Tail};
use super::{Lane, Session, SessionOptions};
use crate::{Qwen35, Recipe};

/// Absolute tolerance on logits, layers and caches: f32 results differ from f64 by up to 1e-4 here, and between summation
/// orders by as much again (fixtures/README.md).
const TOLERANCE: f32 = 5e-4;
const MODELS: [&str; 3] = ["tiny-dense", "tiny-tied", "tiny-moe"];

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// A file of golden tensors.
struct Golden(Vec<u8>);

impl Golden {
    fn open(model: &str, file: &str) -> Self {
        Self(std::fs::read(folder(model).join(file)).unwrap())
    }

    fn floats(&self, name: &str) -> Vec<f32> {
        let file = SafeTensors::deserialize(&self.0).unwrap();
        let data = file.tensor(name).unwrap_or_else(|_| panic!("{name} is missing")).data().to_vec();
        data.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
    }

    fn ids(&self, name: &str) -> Vec<u32> {
        let file = SafeTensors::deserialize(&self.0).unwrap();
        let data = file.tensor(name).unwrap().data().to_vec();
        data.as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b) as u32).collect()
    }
}

fn close(what: &str, got: &[f32], expected: &[f32]) {
    assert_eq!(got.len(), expected.len(), "{what}");
    let worst = got.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, |m: f32, d| if d <= m { m } else { d });
    assert!(worst <= TOLERANCE, "{what}: differs by {worst}");
}

fn load(model: &str) -> Qwen35<Cpu> {
    Qwen35::load(&Cpu::new(), folder(model), &Recipe::Keep, &mut |_| {}).unwrap()
}

fn open(session: &mut Session<Cpu>) -> Committed<Lane> {
    session.open_lane(&LaneOptions::new(160)).unwrap()
}

/// State of GDN layer `g` in slot 0.
fn gdn_state(s: &mut Session<Cpu>, g: usize) -> (Vec<f32>, Vec<f32>) {
    let state = s.cache.gdn[g].state.clone();
    (s.download_floats(&state.window).unwrap(), s.download_floats(&state.matrix).unwrap())
}

/// Keys or values of a layer as `[Hkv, tokens, D]`.
fn kv(s: &mut Session<Cpu>, lane: &Lane, view: &View<Cpu>, heads: usize, slots: std::ops::Range<usize>) -> Vec<f32> {
    let mut out = Vec::new();
    for h in 0..heads {
        for t in slots.clone() {
            let row = (lane.reserved.pages[t / PAGE_TOKENS] as usize * heads + h) * PAGE_TOKENS + t % PAGE_TOKENS;
            out.extend(s.download_floats(&view.row_range(row..row + 1).unwrap()).unwrap());
        }
    }
    out
}

/// Index of each layer among the layers of its kind, by layer number; true for GDN.
fn kinds(model: &Qwen35<Cpu>) -> Vec<(bool, usize)> {
    let mut counts = [0, 0];
    let kinds = model.config().layers.iter().map(|k| *k == crate::config::LayerKind::LinearAttention);
    kinds
        .map(|gdn| {
            let n = &mut counts[usize::from(gdn)];
            *n += 1;
            (gdn, *n - 1)
        })
        .collect()
}

/// Logits of `expected`'s rows, which are the last ones of a prompt's.
fn last_rows<'a>(all: &'a [f32], expected: &[f32]) -> &'a [f32] {
    &all[all.len() - expected.len()..]
}

fn prompt_logits(s: &mut Session<Cpu>, lane: &mut Committed<Lane>, ids: &[u32]) -> Vec<f32> {
    let mut all = Vec::new();
    let mut sink = |_: usize, rows: &[f32]| {
        all.extend_from_slice(rows);
        Ok(())
    };
    s.prefill(lane, ids, PrefillEnd::More, Some(&mut sink)).unwrap();
    all
}

fn golden_logits(golden: &Golden) -> Vec<f32> {
    golden.floats("prefill.logits_last5")
}

#[test]
fn prefill_matches_layer_by_layer() {
    for name in MODELS {
        let (model, golden) = (load(name), Golden::open(name, "golden.safetensors"));
        let mut s = model.session(&SessionOptions::new(160)).unwrap();
        let ids = golden.ids("input_ids");
        let mut lane = open(&mut s);
        let trace = s.trace_prompt(&mut lane, &ids[..37]).unwrap();
        for (i, layer) in trace.layers.iter().enumerate() {
            close(&format!("{name} layer {i}"), layer, &golden.floats(&format!("prefill.layer.{i}")));
        }
        close(name, &trace.final_norm, &golden.floats("prefill.final_norm"));
        for (i, (gdn, at)) in kinds(&model).into_iter().enumerate() {
            if gdn {
                let (window, matrix) = gdn_state(&mut s, at);
                close(&format!("{name} conv {i}"), &window, &golden.floats(&format!("prefill.cache.{i}.conv")));
                close(&format!("{name} state {i}"), &matrix, &golden.floats(&format!("prefill.cache.{i}.state")));
            }
        }
        drop(lane);
        let mut lane = open(&mut s);
        let logits = prompt_logits(&mut s, &mut lane, &ids[..37]);
        let expected = golden_logits(&golden);
        close(&format!("{name} logits"), last_rows(&logits, &expected), &expected);
    }
}

#[test]
fn steps_match_logits_and_states() {
    for name in MODELS {
        let (model, golden) = (load(name), Golden::open(name, "golden.safetensors"));
        let mut s = model.session(&SessionOptions::new(160)).unwrap();
        let ids = golden.ids("input_ids");
        let mut lane = open(&mut s);
        s.prefill(&mut lane, &ids[..37], PrefillEnd::More, None).unwrap();
        for step in 0..5 {
            let mut lanes = [&mut lane];
            let round = s.verify(&mut lanes, &[RoundRow::new(ids[37 + step]).with_logits()]).unwrap();
            let logits = round.outcomes()[0].logits.clone().unwrap();
            round.commit(&[1]).unwrap();
            close(&format!("{name} step {step}"), &logits, &golden.floats(&format!("step.{step}.logits")));
        }
        s.snapshot(&mut lane).unwrap(); // folds the last step
        for (i, (gdn, at)) in kinds(&model).into_iter().enumerate() {
            if gdn {
                let (window, matrix) = gdn_state(&mut s, at);
                close(&format!("{name} conv {i}"), &window, &golden.floats(&format!("step.4.cache.{i}.conv")));
                close(&format!("{name} state {i}"), &matrix, &golden.floats(&format!("step.4.cache.{i}.state")));
            } else if at + 1 == s.cache.kv.len() {
                // The last full-attention layer, whose keys and values depend on all below.
                let layer = s.cache.kv[at].clone();
                let keys = kv(&mut s, lane.get(), &layer.keys, layer.heads, 0..42);
                let values = kv(&mut s, lane.get(), &layer.values, layer.heads, 0..42);
                close(&format!("{name} keys {i}"), &keys, &golden.floats(&format!("final.cache.{i}.key")));
                close(&format!("{name} values {i}"), &values, &golden.floats(&format!("final.cache.{i}.value")));
            }
        }
    }
}

#[test]
fn a_prompt_token_by_token_and_split_everywhere_gives_the_same_logits() {
    for name in MODELS {
        let (model, golden) = (load(name), Golden::open(name, "golden.safetensors"));
        let mut s = model.session(&SessionOptions::new(160)).unwrap();
        let ids = golden.ids("input_ids");
        let expected = golden_logits(&golden);
        for split in 1..37 {
            let mut lane = open(&mut s);
            let mut logits = prompt_logits(&mut s, &mut lane, &ids[..split]);
            logits.extend(prompt_logits(&mut s, &mut lane, &ids[split..37]));
            close(&format!("{name} split at {split}"), last_rows(&logits, &expected), &expected);
        }
        let mut lane = open(&mut s);
        let logits: Vec<f32> = (0..37).flat_map(|i| prompt_logits(&mut s, &mut lane, &ids[i..=i])).collect();
        close(&format!("{name} token by token"), last_rows(&logits, &expected), &expected);
        drop(lane);
        // The same by decoding steps.
        let mut lane = open(&mut s);
        let mut logits = Vec::new();
        for id in &ids[..37] {
            let mut lanes = [&mut lane];
            let round = s.verify(&mut lanes, &[RoundRow::new(*id).with_logits()]).unwrap();
            logits.extend(round.outcomes()[0].logits.clone().unwrap());
            round.commit(&[1]).unwrap();
        }
        close(&format!("{name} by steps"), last_rows(&logits, &expected), &expected);
    }
}

#[test]
fn a_long_prompt_matches_at_every_chunk_size() {
    for name in MODELS {
        let (model, golden) = (load(name), Golden::open(name, "long.safetensors"));
        let ids = golden.ids("input_ids");
        for chunk in [1024, 64, 3, 67, 1] {
            let mut s = model.session(&SessionOptions::new(160).with_prefill_chunk(chunk)).unwrap();
            let mut lane = open(&mut s);
            let logits = prompt_logits(&mut s, &mut lane, &ids);
            let expected = golden.floats("logits_last5");
            close(&format!("{name} chunk {chunk}"), last_rows(&logits, &expected), &expected);
            for (i, (gdn, at)) in kinds(&model).into_iter().enumerate().filter(|(_, k)| k.0) {
                assert!(gdn);
                let (window, matrix) = gdn_state(&mut s, at);
                close(&format!("{name} conv {i}"), &window, &golden.floats(&format!("cache.{i}.conv")));
                close(&format!("{name} state {i}"), &matrix, &golden.floats(&format!("cache.{i}.state")));
            }
        }
    }
}

#[test]
fn greedy_text_matches() {
    for name in MODELS {
        let file = std::fs::read_to_string(folder(name).join("greedy.json")).unwrap();
        let json: serde_json::Value = serde_json::from_str(&file).unwrap();
        let ids = |key: &str| -> Vec<u32> {
            json[key].as_array().unwrap().iter().map(|v| v.as_u64().unwrap() as u32).collect()
        };
        let mut s = load(name).session(&SessionOptions::new(160)).unwrap();
        for k in 0..=5 {
            let mut lane = open(&mut s);
            let end = PrefillEnd::Choose { drafts: k };
            let first = s.prefill(&mut lane, &ids("prompt_ids"), end, None).unwrap().unwrap();
            let (mut tokens, mut drafts) = (first.tokens.to_vec(), first.drafts);
            while tokens.len() < 32 {
                let row = RoundRow::new(tokens[tokens.len() - 1]).with_drafts(&drafts).with_next_drafts(k);
                let mut lanes = [&mut lane];
                let round = s.verify(&mut lanes, &[row]).unwrap();
                let n = round.outcomes()[0].tokens.len();
                let outcome = round.commit(&[n]).unwrap().remove(0);
                tokens.extend_from_slice(&outcome.tokens);
                drafts = outcome.drafts;
            }
            assert_eq!(tokens[..32], ids("new_ids")[..], "{name}, k = {k}");
        }
    }
}

#[test]
fn mtp_rows_and_chained_drafts_match() {
    for name in MODELS {
        let (model, golden) = (load(name), Golden::open(name, "mtp_golden.safetensors"));
        let mut s = model.session(&SessionOptions::new(160)).unwrap();
        let (prompt, shifted) = (golden.ids("prompt_ids"), golden.ids("prefill.token_ids"));
        let next = shifted[36];
        // Row s of the block is row s − 1 of the golden: it takes the token of position s.
        let mut lane = open(&mut s);
        let trace = s.trace_prompt(&mut lane, &[&prompt[..], &[next]].concat()).unwrap();
        let hidden = model.config().hidden;
        close(name, &trace.mtp[hidden..], &golden.floats("prefill.hidden_out"));
        drop(lane);

        // Drafts behind a given next token: what a round does after acceptance.
        let mut lane = open(&mut s);
        s.prefill(&mut lane, &prompt, PrefillEnd::More, None).unwrap();
        let drafts = draft_behind(&mut s, lane.get_mut(), next, 4);
        let expected: Vec<u32> = (0..3).map(|i| golden.ids(&format!("draft.{i}.token_in"))[0]).collect();
        assert_eq!(drafts[..3], expected[..], "{name}");
        let logits = golden.floats("draft.2.logits");
        let best = (0..logits.len()).max_by(|a, b| logits[*a].total_cmp(&logits[*b])).unwrap();
        assert_eq!(drafts[3] as usize, best, "{name}");
        let layer = s.cache.mtp_kv.clone().unwrap();
        let keys = kv(&mut s, lane.get(), &layer.keys, layer.heads, 1..41);
        let values = kv(&mut s, lane.get(), &layer.values, layer.heads, 1..41);
        close(&format!("{name} MTP keys"), &keys, &golden.floats("final.key"));
        close(&format!("{name} MTP values"), &values, &golden.floats("final.value"));
    }
}

/// Runs the drafting part of a round as if `token` had been chosen behind the lane.
fn draft_behind(s: &mut Session<Cpu>, lane: &mut Lane, token: u32, count: usize) -> Vec<u32> {
    let position = lane.position;
    let segment = Segment { slot: lane.reserved.slot, start: position as u32, row: 0, len: 1, fold: 0, bank: 0 };
    s.ingress.clear();
    let realign = s.ingress.table(std::iter::once(segment)).unwrap();
    let chain = s.ingress.table((0..count as u32).map(|i| Segment { start: segment.start + i, ..segment })).unwrap();
    let chosen = s.ingress.ids(std::iter::once(token)).unwrap();
    let last = s.ingress.indices(std::iter::once(Some(0))).unwrap();
    let ring = lane.reserved.slot as usize * super::cache::RING + (position - 1) % super::cache::RING;
    let index = s.ingress.indices(std::iter::once(Some(ring))).unwrap();
    s.ingress.send(s.model.backend(), &mut s.queue).unwrap();
    let batch = Batch::new(Profile::Step, 1, realign.clone()).unwrap();
    let tail = Tail {
        batch: &batch,
        ids: &chosen,
        normed: &s.cache.hidden.row_range(0..1).unwrap(),
        index: &index,
        columns: 1,
        next: count,
        sampled: false,
        prompt: false,
        limit: s.limits.token_limit,
    };
    let segments = DraftSegments { realign, last, chain };
    let (model, cache, buffers, rows) = (&s.model, &s.cache, &s.tail, &s.rows);
    model.backend().run(&mut s.queue, |rec| model.draft(rec, &tail, &chosen, &segments, buffers, cache, rows)).unwrap();
    let egress = s.tail.egress(1, 1, count).unwrap();
    let mut bytes = vec![0u8; egress.span_bytes()];
    s.model.backend().download(&mut s.queue, &egress, &mut bytes).unwrap();
    bytes.as_chunks::<4>().0[2..].iter().map(|b| u32::from_le_bytes(*b)).collect()
}

#[test]
fn bf16_pages_stay_close_to_f32_pages() {
    // Rounding keys and values to 8 significant bits moves logits of this size by a few hundredths.
    let golden = Golden::open("tiny-moe", "golden.safetensors");
    let model = load("tiny-moe");
    let ids = golden.ids("input_ids");
    let mut s = model.session(&SessionOptions::new(160).with_kv_dtype(DType::Bf16)).unwrap();
    let mut lane = open(&mut s);
    let logits = prompt_logits(&mut s, &mut lane, &ids[..37]);
    let expected = golden_logits(&golden);
    let worst = last_rows(&logits, &expected).iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(worst > TOLERANCE && worst < 0.5, "{worst}");
}

/// Codes of eight bits move logits further than bf16 does; an image brings pages and scales back bit for bit.
#[test]
fn quantised_pages_stay_close_and_survive_an_image() {
    let golden = Golden::open("tiny-moe", "golden.safetensors");
    let model = load("tiny-moe");
    let ids = golden.ids("input_ids");
    let expected = golden_logits(&golden);
    for dtype in [DType::I8, DType::F8E4M3] {
        let mut s = model.session(&SessionOptions::new(160).with_kv_dtype(dtype)).unwrap();
        let mut lane = open(&mut s);
        let logits = prompt_logits(&mut s, &mut lane, &ids[..37]);
        let worst = last_rows(&logits, &expected).iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(worst > TOLERANCE && worst < 1.0, "{dtype}: {worst}");
        let image = s.snapshot(&mut lane).unwrap();
        let goes_on = prompt_logits(&mut s, &mut lane, &ids[37..41]);
        drop(lane);
        let mut lane = s.restore(&image, &LaneOptions::new(160)).unwrap();
        assert_eq!(s.snapshot(&mut lane).unwrap().image(), image.image(), "{dtype}");
        assert_eq!(prompt_logits(&mut s, &mut lane, &ids[37..41]), goes_on, "{dtype}");
    }
}
