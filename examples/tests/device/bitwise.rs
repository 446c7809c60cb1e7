//! What a token's logits are does not depend, by a bit, on what else is computed beside it or on how a prompt is cut.

use ninfer_core::DType;
use ninfer_core::backend::InferenceBackend;
use ninfer_core::model::{CausalModel, RoundRow};
use ninfer_models::{Qwen35, Session, SessionOptions};

use crate::bench::{
    Extent, model, on_every_backend, open, prefill, prompt_logits, round, same_bits, shipped_model, tiny_model, tokens,
};

/// Checkpoints, `None` for the shipped one, and recipes: every kind of layer, dense and sparse, and every numeric class of products.
/// The first two are for processors.
const MODELS: [(Option<&str>, &str); 9] = [
    (None, "keep"),
    (Some("tiny-dense"), "q5"),
    (None, "groupwise"),
    (None, "nvfp4"),
    (None, "fp8-block"),
    (None, "fp8-a8"),
    (Some("tiny-dense"), "keep"),
    (Some("tiny-tied"), "keep"),
    (Some("tiny-moe"), "w8"),
];

/// Most columns of a round here.
const COLUMNS: usize = 8;
const LANES: usize = 8;

/// Runs a check on every model, with its name; on the first one also with every type of KV pages.
fn on_models<B: InferenceBackend>(backend: &B, extent: Extent, check: impl Fn(&str, &Qwen35<B>, SessionOptions)) {
    for (i, (name, recipes)) in extent.of(&MODELS, 2).iter().enumerate() {
        let folder = name.map_or_else(shipped_model, tiny_model);
        let model = model(backend, &folder, recipes);
        let kv_dtypes: &[DType] = if i == 0 { backend.kv_dtypes() } else { &backend.kv_dtypes()[..1] };
        for dtype in extent.of(kv_dtypes, 1) {
            let what = format!("{} {recipes}, {dtype} pages", name.unwrap_or("shipped"));
            check(&what, &model, SessionOptions::new(1024).with_kv_dtype(*dtype));
        }
    }
}

fn logits_of<B: InferenceBackend>(
    session: &mut Session<B>,
    lane: &mut ninfer_core::state::Committed<ninfer_models::session::Lane>,
    columns: &[u32],
    commit: usize,
) -> Vec<f32> {
    let row = RoundRow::new(columns[0]).with_drafts(&columns[1..]).with_logits();
    round(session, lane, row, commit).logits.unwrap()
}

/// One column after the other, against rounds of 2 to 8 columns, at prompts that end inside, before and behind the 64 rows of a
/// chunk and the 256 keys of a leaf of attention.
fn columns<B: InferenceBackend>(backend: &B, extent: Extent) {
    on_models(backend, extent, |what, model, options| {
        let mut s = model.session(&options.with_max_drafts(COLUMNS - 1)).unwrap();
        let vocab = s.limits().vocab;
        for &length in extent.of(&[70, 253, 1, 63, 64, 320], 2) {
            let text = tokens(length, 1, vocab);
            let input = tokens(2 * COLUMNS, 2, vocab);
            let mut lane = open(&mut s, 400);
            prefill(&mut s, &mut lane, &text);
            let single: Vec<_> = input.iter().map(|t| logits_of(&mut s, &mut lane, &[*t], 1)).collect();
            let (end, next) = (s.snapshot(&mut lane).unwrap(), logits_of(&mut s, &mut lane, &[7], 0));
            drop(lane);
            for width in 2..=COLUMNS {
                let mut lane = open(&mut s, 400);
                prefill(&mut s, &mut lane, &text);
                let mut at = 0;
                while at < input.len() {
                    // More columns than are committed: the last one is verified and given up.
                    let columns = &input[at..(at + width).min(input.len())];
                    let commit = if at + width < input.len() { width - 1 } else { columns.len() };
                    let got = logits_of(&mut s, &mut lane, columns, commit);
                    let expected = single[at..at + columns.len()].concat();
                    same_bits(&format!("{what}: {width} columns at {}", length + at), &got, &expected);
                    at += commit;
                }
                let state = s.snapshot(&mut lane).unwrap();
                assert!(state.image().recurrent() == end.image().recurrent(), "{what}: state behind {width} columns");
                let got = logits_of(&mut s, &mut lane, &[7], 0);
                same_bits(&format!("{what}: behind rounds of {width} columns"), &got, &next);
            }
        }
    });
}

/// Each of eight sequences of other lengths alone, against two to eight of them together, each with one to four columns.
fn batches<B: InferenceBackend>(backend: &B, extent: Extent) {
    on_models(backend, extent, |what, model, options| {
        let mut s = model.session(&options.with_lanes(LANES).with_max_drafts(3)).unwrap();
        let vocab = s.limits().vocab;
        let lengths = [3, 64, 130, 17, 255, 1, 63, 300];
        let mut lanes: Vec<_> = lengths
            .iter()
            .enumerate()
            .map(|(i, &length)| {
                let mut lane = open(&mut s, 400);
                prefill(&mut s, &mut lane, &tokens(length, i as u32, vocab));
                lane
            })
            .collect();
        for step in 0..4 {
            let inputs: Vec<_> =
                (0..LANES).map(|i| tokens(1 + (i + step) % 4, (20 * step + i) as u32, vocab)).collect();
            let alone: Vec<_> =
                lanes.iter_mut().zip(&inputs).map(|(lane, input)| logits_of(&mut s, lane, input, 0)).collect();
            for count in 2..=LANES {
                let rows: Vec<_> = inputs[..count]
                    .iter()
                    .map(|input| RoundRow::new(input[0]).with_drafts(&input[1..]).with_logits())
                    .collect();
                let mut some: Vec<_> = lanes[..count].iter_mut().collect();
                let together = s.verify(&mut some, &rows).unwrap();
                for (i, (got, expected)) in together.outcomes().iter().zip(&alone).enumerate() {
                    let got = got.logits.as_deref().unwrap();
                    same_bits(&format!("{what}: sequence {i} of {count}, step {step}"), got, expected);
                }
                // Only the last time something stays.
                let kept: Vec<_> = inputs[..count].iter().map(|x| if count < LANES { 0 } else { x.len() }).collect();
                together.commit(&kept).unwrap();
            }
        }
    });
}

/// Prompts cut at multiples of 64, inside a call and between calls.
fn splits<B: InferenceBackend>(backend: &B, extent: Extent) {
    let length = if extent == Extent::All { 700 } else { 200 };
    on_models(backend, extent, |what, model, options| {
        let text = tokens(length, 3, model.vocab());
        let mut reference = None;
        for (chunk, cut) in [(1024, 0), (64, 0), (128, 0), (320, 0), (1024, 64), (256, 192)] {
            let mut s = model.session(&options.clone().with_prefill_chunk(chunk)).unwrap();
            let mut lane = open(&mut s, 800);
            let (first, rest) = text.split_at(cut);
            let mut logits = if cut > 0 { prompt_logits(&mut s, &mut lane, first) } else { Vec::new() };
            logits.extend(prompt_logits(&mut s, &mut lane, rest));
            let state = s.snapshot(&mut lane).unwrap();
            let (expected, image) = reference.get_or_insert_with(|| (logits.clone(), state.image().clone()));
            same_bits(&format!("{what}: chunks of {chunk}, cut at {cut}"), &logits, expected);
            assert!(state.image() == image, "{what}: state behind chunks of {chunk}, cut at {cut}");
        }
    });
}

on_every_backend! { columns, batches, splits }
