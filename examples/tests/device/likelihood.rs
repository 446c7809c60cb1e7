//! How likely the shipped model finds held-out text, with its weights as stored and in every recipe.

use ninfer_core::backend::InferenceBackend;
use ninfer_examples::likelihood::Judge;
use ninfer_examples::{corpus, shipped};
use ninfer_models::text::Text;
use serde::Deserialize;

use crate::bench::{Extent, fixture, is_exact, model, on_every_backend, shipped_model};

const WINDOW: usize = 1024;

/// On the mean of 16,368 tokens, in nats: 16-bit activations move it by 0.0004 in transformers, f32 ones by 2e-6.
const TOTAL: [f64; 2] = [0.002, 2e-5];
/// On the mean of a window, which 16-bit activations move by up to 0.006 in both directions.
const PER_WINDOW: [f64; 2] = [0.01, 1e-4];
/// On the mean of 16,368 tokens, against the CPU backend with the same weights.
const RECIPE: f64 = 0.004;

/// What the CPU backend measures on all windows (the table of the README).
const RECIPES: [(&str, f64); 17] = [
    ("w8", 1.88690),
    ("f32", 1.88620),
    ("q4", 2.01251),
    ("q5", 1.91197),
    ("q6", 1.88993),
    ("groupwise", 1.90797),
    ("nvfp4", 1.97685),
    ("fp8", 1.88935),
    ("fp8-a8", 1.89744),
    ("fp8-block", 1.89035),
    ("fp8-block-a8", 1.89804),
    ("nvfp4,bridge-fp8", 1.96929),
    ("nvfp4,bridge-fp8-a8", 1.97785),
    ("nvfp4,bridge-fp8-block", 1.96929),
    ("nvfp4,bridge-fp8-block-a8", 1.97785),
    ("nvfp4,bridge-fp8-amax", 1.98853),
    ("nvfp4,bridge-fp8-amax-a8", 1.99649),
];

#[derive(Deserialize)]
struct Reference {
    f32: Run,
}

#[derive(Deserialize)]
struct Run {
    nll: f64,
    window_nll: Vec<f64>,
}

/// The first 16,384 tokens of the held-out documents.
fn stream() -> Vec<u32> {
    let folder = shipped_model();
    let config = ninfer_models::weights::WeightTable::open(&folder).unwrap().config().clone();
    let text = Text::load(&folder).unwrap();
    let mut ids = corpus::from_text(&shipped::held_out_documents().unwrap(), text.tokenizer(), &config).unwrap();
    ids.truncate(16 * WINDOW);
    ids
}

/// Mean of each window in nats, and of all tokens.
fn measure<B: InferenceBackend>(backend: &B, recipes: &str, tokens: &[u32]) -> (Vec<f64>, f64) {
    let model = model(backend, &shipped_model(), recipes);
    let verdict = Judge::new(&model, None, WINDOW).unwrap().measure(tokens, &mut |_| {}).unwrap();
    (verdict.model.per_window(), verdict.model.nll())
}

fn stored<B: InferenceBackend>(backend: &B, extent: Extent) {
    let reference = fixture::<Reference>("perplexity.json").f32;
    let kind = usize::from(is_exact(backend));
    let windows = extent.of(&reference.window_nll, 2);
    let (got, nll) = measure(backend, "keep", &stream()[..windows.len() * WINDOW]);
    assert_eq!(got.len(), windows.len());
    for (i, (got, expected)) in got.iter().zip(windows).enumerate() {
        assert!((got - expected).abs() <= PER_WINDOW[kind], "window {i}: {got}, expected {expected}");
    }
    if windows.len() == reference.window_nll.len() {
        println!("NLL {nll:.5}, reference {:.5}", reference.nll);
        assert!((nll - reference.nll).abs() <= TOTAL[kind], "{nll}, expected {}", reference.nll);
    }
}

fn recipes<B: InferenceBackend>(backend: &B, extent: Extent) {
    let tokens = stream();
    let mut wrong = Vec::new();
    for &(recipes, expected) in extent.of(&RECIPES, 1) {
        let nll = measure(backend, recipes, &tokens).1;
        let line = format!("{recipes}: NLL {nll:.5}, on the CPU {expected:.5}, difference {:+.5}", nll - expected);
        println!("{line}");
        if (nll - expected).abs() > RECIPE {
            wrong.push(line);
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

on_every_backend! { stored, recipes }
