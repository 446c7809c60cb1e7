//! Perplexity of the weights as stored.

use std::sync::LazyLock;

use ninfer_examples::likelihood::{Judge, Verdict};
use ninfer_examples::{corpus, shipped};
use ninfer_models::Qwen35;
use serde::Deserialize;

use crate::reference::{MODEL, TEXT, fixture};

/// Another order of f32 additions moves the mean of 16,368 tokens by less than this, and that of 1,023 by less than that.
const TOTAL_TOLERANCE: f64 = 2e-5;
const WINDOW_TOLERANCE: f64 = 1e-4;

pub(crate) const WINDOW: usize = 1024;

#[derive(Deserialize)]
struct Reference {
    stream: Stream,
    f32: Run,
}

#[derive(Deserialize)]
struct Stream {
    tokens: usize,
    window: usize,
    scored: usize,
    separator_id: u32,
    first_16_ids: Vec<u32>,
    last_16_ids: Vec<u32>,
    sum_of_ids: u64,
}

#[derive(Deserialize)]
struct Run {
    nll: f64,
    perplexity: f64,
    window_nll: Vec<f64>,
}

/// The first 16,384 tokens of the held-out documents.
pub(crate) static STREAM: LazyLock<Vec<u32>> = LazyLock::new(|| {
    let file = shipped::held_out_documents().unwrap();
    let mut ids = corpus::from_text(&file, TEXT.tokenizer(), MODEL.config()).unwrap();
    ids.truncate(16_384);
    ids
});

pub(crate) fn measure(
    model: &Qwen35<ninfer_kernels::cpu::Cpu>,
    reference: Option<&Qwen35<ninfer_kernels::cpu::Cpu>>,
    tokens: &[u32],
) -> Verdict {
    Judge::new(model, reference, WINDOW).unwrap().measure(tokens, &mut |_| {}).unwrap()
}

#[test]
fn the_token_stream_is_the_reference() {
    let expected = fixture::<Reference>("perplexity.json").stream;
    assert_eq!((STREAM.len(), WINDOW), (expected.tokens, expected.window));
    assert_eq!(STREAM[..16], expected.first_16_ids);
    assert_eq!(STREAM[STREAM.len() - 16..], expected.last_16_ids);
    assert_eq!(STREAM.iter().map(|&id| u64::from(id)).sum::<u64>(), expected.sum_of_ids);
    assert_eq!(TEXT.tokenizer().token_to_id("<|endoftext|>"), Some(expected.separator_id));
}

#[test]
fn perplexity_is_the_reference() {
    let expected: Reference = fixture("perplexity.json");
    let got = measure(&MODEL, None, &STREAM).model;
    assert_eq!(got.scored(), expected.stream.scored);
    let difference = got.nll() - expected.f32.nll;
    assert!(difference.abs() <= TOTAL_TOLERANCE, "{} is off by {difference:e}", got.nll());
    assert!((got.perplexity() / expected.f32.perplexity - 1.0).abs() < 2.0 * TOTAL_TOLERANCE);
    let windows = got.per_window();
    assert_eq!(windows.len(), expected.f32.window_nll.len());
    for (i, (got, expected)) in windows.iter().zip(&expected.f32.window_nll).enumerate() {
        assert!((got - expected).abs() <= WINDOW_TOLERANCE, "window {i}: {got}, expected {expected}");
    }
}

#[test]
fn windows_do_not_depend_on_each_other_and_short_ones_count() {
    let all = measure(&MODEL, None, &STREAM[..WINDOW + 70]).model;
    let second = measure(&MODEL, None, &STREAM[WINDOW..WINDOW + 70]).model;
    assert_eq!(all.windows.iter().map(Vec::len).collect::<Vec<_>>(), [WINDOW - 1, 69]);
    assert_eq!(all.windows[1], second.windows[0]);
    // A window of one token has nothing to score.
    assert_eq!(measure(&MODEL, None, &STREAM[..WINDOW + 1]).model.windows, all.windows[..1]);
}

#[test]
fn a_model_agrees_with_itself() {
    let (reference, agreement) = measure(&MODEL, Some(&MODEL), &STREAM[..300]).reference.unwrap();
    assert_eq!((agreement.kl, agreement.top1_agreement), (0.0, 1.0));
    assert_eq!(reference, measure(&MODEL, None, &STREAM[..300]).model);
}
