//! Recipes that the reference has no figures for: what they load as, and that the model still speaks.

use ninfer_core::WeightFormat;
use ninfer_examples::formats::Formats;
use ninfer_examples::loader::load;
use ninfer_examples::progress::Progress;
use ninfer_examples::recipes::Recipes;
use ninfer_kernels::cpu::Cpu;
use ninfer_models::Qwen35;

use crate::perplexity::{STREAM, WINDOW, measure};
use crate::reference::{MODEL, table};

const EDGES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/recipes/edges.toml");

fn model(recipes: &Recipes) -> Qwen35<Cpu> {
    load(&Cpu::new(), &table(), recipes, true, Progress::new(false)).unwrap()
}

/// What is planned without loading is what is loaded, to the byte. (NVFP4 and blocks have a scale more for each planned part of
/// a matrix.)
#[test]
fn plans_are_what_is_loaded() {
    let table = table();
    let shape = table.shape();
    for text in ["keep", "bf16", "q5", "w8", "fp8-a8", "groupwise", EDGES] {
        let recipes: Recipes = text.parse().unwrap();
        let formats = Formats::of_checkpoint(&table, &recipes);
        let format = formats.of(&shape);
        let bytes = |t: ninfer_core::shape::TensorShape| format(&t).bytes(t.rows, t.cols) * t.count;
        let planned: usize = shape.tensors().map(bytes).sum();
        let model = model(&recipes);
        // One frequency for each rotated pair.
        let frequencies = model.weight_bytes() - planned;
        assert_eq!(frequencies % WeightFormat::F32.bytes(1, 1), 0, "{text}");
        assert!(
            frequencies <= 4 * table.config().attention.head_dim / 2,
            "{text}: {frequencies} bytes more than planned"
        );
    }
}

/// Differences of the mean negative log-likelihood of 2,046 scored tokens to the weights as stored, measured and allowed. Other sums
/// round inputs to other codes here and there, so the bounds are wide; a wrong scale or a lost part costs several nats.
#[test]
fn text_stays_likely() {
    let tokens = &STREAM[..2 * WINDOW];
    let stored = measure(&MODEL, None, tokens).model.nll();
    for (text, measured, most) in
        [("fp8-a8", 0.016, 0.05), ("nvfp4,bridge-fp8-a8", 0.122, 0.2), ("groupwise", 0.050, 0.1), (EDGES, 0.031, 0.1)]
    {
        let difference = measure(&model(&text.parse().unwrap()), None, tokens).model.nll() - stored;
        assert!(difference.abs() < most, "{text}: {difference} nats, once {measured}");
    }
}
