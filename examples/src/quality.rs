//! What weight recipes cost: bytes, likelihood, distance to the weights as stored, and acceptance of MTP drafts.

use ninfer_core::backend::InferenceBackend;
use ninfer_models::weights::{MtpState, WeightTable};
use ninfer_models::{Qwen35, SessionOptions};
use ninfer_quant::Recipe;
use ninfer_spec::{Drafts, Generator, Options, Statistics};
use serde::Serialize;

use crate::Result;
use crate::likelihood::Judge;
use crate::loader::load;
use crate::progress::Progress;
use crate::recipes::Recipes;
use crate::table::{Align, Table, grouped};

/// Drafts of a round when acceptance is measured.
const DRAFTS: usize = 3;
/// Tokens of a prompt whose continuation is drafted.
const PROMPT: usize = 128;
/// Tokens of a continuation.
const ANSWER: usize = 96;
/// Prompts: the beginnings of the first windows of the text.
const PROMPTS: usize = 8;

/// What one recipe costs.
#[derive(Clone, Debug, Serialize)]
pub struct Quality {
    /// The recipe.
    pub weights: String,
    /// Bytes of all loaded weights, the MTP block included.
    pub weight_bytes: usize,
    /// Mean negative log-likelihood in nats.
    pub nll: f64,
    /// `exp` of it.
    pub perplexity: f64,
    /// Mean divergence from the weights as stored, in nats.
    pub kl: f64,
    /// Share of positions with the same most likely token.
    pub top1_agreement: f64,
    /// Share of accepted drafts by position in the round, of greedy continuations; empty without an MTP block.
    pub accepted: Vec<f64>,
    /// Tokens that a round with these drafts brings.
    pub tokens_per_round: Option<f64>,
}

/// The weights as stored, then every recipe that changes something. Recipes for NVFP4 are preceded by one that makes it
/// where a checkpoint has none.
#[must_use]
pub fn recipes(table: &WeightTable) -> Vec<Recipes> {
    let mut out = vec![Recipes::default()];
    let places = table.places();
    for recipe in Recipe::ALL {
        let alone = Recipes::from(recipe.clone());
        let changes = places.iter().any(|p| {
            let stored = p.stored.weight_format();
            stored.is_none_or(|stored| !alone.recipe().target(&table.site_of(p).0, stored).keeps())
        });
        if changes {
            out.push(alone);
        } else if recipe.name().is_some_and(|name| name.starts_with("bridge")) {
            out.push(Recipes::from_iter([Recipe::Nvfp4, recipe]));
        }
    }
    out
}

/// Measures one recipe on a token stream; `progress` is told how many tokens are scored.
///
/// # Errors
/// What loading and the models report.
pub fn measure<B: InferenceBackend>(
    backend: &B,
    table: &WeightTable,
    recipes: &Recipes,
    tokens: &[u32],
    window: usize,
    progress: &mut dyn FnMut(usize),
) -> Result<Quality> {
    let quiet = Progress::new(false);
    let model = load(backend, table, recipes, true, quiet)?;
    let reference = load(backend, table, &Recipes::default(), false, quiet)?;
    let mut judge = Judge::new(&model, Some(&reference), window.min(tokens.len().max(2)))?;
    let verdict = judge.measure(tokens, progress)?;
    drop((judge, reference));
    let (kl, top1_agreement) =
        verdict.reference.as_ref().map_or((0.0, 1.0), |(_, agreement)| (agreement.kl, agreement.top1_agreement));
    let statistics = match table.mtp() {
        MtpState::Complete => Some(drafts(&model, tokens, window)?),
        MtpState::Absent => None,
    };
    let accepted = statistics.iter().flat_map(|s| (0..DRAFTS).map(|i| s.acceptance_at(i))).collect();
    Ok(Quality {
        weights: recipes.to_string(),
        weight_bytes: model.weight_bytes(),
        nll: verdict.model.nll(),
        perplexity: verdict.model.perplexity(),
        kl,
        top1_agreement,
        accepted,
        tokens_per_round: statistics.map(|s| s.tokens_per_round()),
    })
}

/// Greedy continuations of the beginnings of windows, stop tokens ignored.
fn drafts<B: InferenceBackend>(model: &Qwen35<B>, tokens: &[u32], window: usize) -> Result<Statistics> {
    let mut statistics = Statistics::new();
    for prompt in tokens.chunks(window).take(PROMPTS) {
        let prompt = &prompt[..prompt.len().min(PROMPT)];
        let options = SessionOptions::new(PROMPT + ANSWER + DRAFTS + 1).with_max_drafts(DRAFTS);
        let mut session = model.session(&options)?;
        let options =
            Options::new().with_max_new(ANSWER).with_ignore_stop(true).with_drafts(Drafts::Fixed(DRAFTS)).with_mtp();
        let mut own = Generator::new(&mut session, options)?.generate(prompt, |tokens| tokens.len())?.statistics;
        // Without stop tokens a small model may repeat itself; that is no fault here.
        own.looping = false;
        statistics.merge(&own)?;
    }
    Ok(statistics)
}

/// A line for each recipe.
#[must_use]
pub fn table(rows: &[Quality]) -> Table {
    let right = Align::Right;
    let mut table = Table::new(&[
        ("weights", Align::Left),
        ("bytes", right),
        ("NLL", right),
        ("perplexity", right),
        ("KL", right),
        ("same top token", right),
        ("accepted drafts, 1st / 2nd / 3rd", right),
        ("tokens a round", right),
    ]);
    for q in rows {
        let accepted: Vec<String> = q.accepted.iter().map(|a| format!("{a:.3}")).collect();
        table.row([
            format!("`{}`", q.weights),
            grouped(q.weight_bytes as u64),
            format!("{:.5}", q.nll),
            format!("{:.4}", q.perplexity),
            format!("{:.4}", q.kl),
            format!("{:.2} %", 100.0 * q.top1_agreement),
            accepted.join(" / "),
            q.tokens_per_round.map_or_else(String::new, |t| format!("{t:.2}")),
        ]);
    }
    table
}
