//! Measures how likely a model finds a text, and what a weight format costs.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use ninfer_core::backend::InferenceBackend;
use ninfer_core::memory::binary_size;
use ninfer_examples::arguments::from;
use ninfer_examples::device::{DeviceChoice, Work};
use ninfer_examples::likelihood::{Judge, Likelihood, Verdict};
use ninfer_examples::loader::load;
use ninfer_examples::progress::Progress;
use ninfer_examples::recipes::Recipes;
use ninfer_examples::table::{Align, Table, grouped};
use ninfer_examples::{Result, arguments, corpus, failure, output, quality, shipped};
use ninfer_models::text::Tokenizer;
use ninfer_models::weights::WeightTable;
use serde_json::{Map, Value, json};

/// Tokens of the shipped documents that are measured where nothing else is asked for.
const DEFAULT_TOKENS: usize = 16_384;

const EXAMPLES: &str = "\
Examples:
  perplexity
      The shipped model on documents that were held out in its training.
  perplexity --weights nvfp4 --reference keep
      What NVFP4 costs: divergence from, and agreement with, the weights as stored.
  perplexity --weights nvfp4,bridge-fp8 --reference nvfp4 --json
      What the conversion of NVFP4 to FP8 adds.
  perplexity --table > quality.md
      Every recipe: bytes, perplexity, distance to the weights as stored, acceptance of MTP drafts; a Markdown table.
  perplexity --model ~/models/Qwen3.5-4B --text book.txt --window 4096 --max-tokens 65536
      Another checkpoint, another text, longer windows.
  perplexity --token-ids ids.json --per-token --json
      Ids instead of text; the likelihood of every token.

The text is cut into windows; each starts from an empty state and its first token is not scored.
Exit status: 0, or 1 for an error, or 2 for a command line that is not legal.";

/// Measure the perplexity of a text.
#[derive(Debug, Parser)]
#[command(name = "perplexity", version, after_help = EXAMPLES)]
struct Arguments {
    /// Folder of a checkpoint [default: the shipped model]
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// Plain text, or FILE.json with a list of strings: documents, the end-of-text token is put behind each
    /// [default: the held-out documents of the shipped model]
    #[arg(long, value_name = "FILE", conflicts_with = "token_ids")]
    text: Option<PathBuf>,
    /// A JSON list of token ids, or an object whose `token_ids` is one
    #[arg(long, value_name = "FILE.json")]
    token_ids: Option<PathBuf>,
    /// Tokens of a window
    #[arg(long, value_name = "N", value_parser = from(2), default_value = "1024")]
    window: usize,
    /// Measure the first N tokens only [default: 16384 of the shipped documents, else all]
    #[arg(long, value_name = "N", value_parser = from(1))]
    max_tokens: Option<usize>,
    /// Formats of the weights: keep, bf16, f32, q4, q5, q6, w8, groupwise, nvfp4, fp8, fp8-block, bridge-fp8, bridge-fp8-block,
    /// bridge-fp8-amax; with -a8 behind one of FP8 also E4M3 activations; or a file of rules, *.toml; or several of them in a row,
    /// separated by commas
    #[arg(long, value_name = "RECIPE", default_value = "keep")]
    weights: Recipes,
    /// Compare with the same model under another recipe: divergence and agreement of the most likely token
    #[arg(long, value_name = "RECIPE")]
    reference: Option<Recipes>,
    /// Measure every recipe against the weights as stored, and print a Markdown table
    #[arg(long, conflicts_with_all = ["weights", "reference", "per_token"])]
    table: bool,
    /// Where to run: auto, cpu, cuda or cuda:N
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    device: DeviceChoice,
    /// Threads of the CPU backend [default: all]
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    /// List the likelihood of every token (with --json)
    #[arg(long, requires = "json")]
    per_token: bool,
    /// Print one JSON object instead of tables
    #[arg(long)]
    json: bool,
    /// No progress bars
    #[arg(long)]
    quiet: bool,
}

fn main() -> ExitCode {
    match arguments::parse::<Arguments>() {
        Ok(arguments) => failure::exit(run(&arguments)),
        Err(status) => status,
    }
}

fn run(arguments: &Arguments) -> Result<()> {
    arguments.device.open(arguments.threads)?.run(arguments)
}

impl Work for &Arguments {
    fn run<B: InferenceBackend>(self, backend: &B) -> Result<()> {
        measure(backend, self)
    }
}

fn measure<B: InferenceBackend>(backend: &B, arguments: &Arguments) -> Result<()> {
    let progress = Progress::new(!arguments.json && !arguments.quiet);
    let dir = shipped::model_or_shipped(arguments.model.as_deref())?;
    let table = WeightTable::open(&dir)?;
    let limit = table.config().max_positions;
    if arguments.window > limit {
        let message = format!("--window is {}, the model is made for {limit} positions", arguments.window);
        return Err(failure::Failure::usage(message, format!("give at most {limit}")));
    }
    let tokens = tokens(arguments, &dir, &table)?;
    if arguments.table {
        return compare(backend, arguments, &table, &tokens, progress);
    }

    let model = load(backend, &table, &arguments.weights, false, progress)?;
    let reference = arguments.reference.as_ref().map(|r| load(backend, &table, r, false, progress)).transpose()?;
    let mut judge = Judge::new(&model, reference.as_ref(), arguments.window.min(tokens.len().max(2)))?;
    let bar = progress.bar("scoring", tokens.len() as u64, "tokens");
    let verdict = judge.measure(&tokens, &mut |done| bar.set_position(done as u64))?;
    bar.finish_and_clear();

    if arguments.json {
        return output::write_json(&json(arguments, &tokens, &verdict, model.weight_bytes()));
    }
    output::write(&report(arguments, &tokens, &verdict, model.weight_bytes()))
}

/// Every recipe beside the weights as stored.
fn compare<B: InferenceBackend>(
    backend: &B,
    arguments: &Arguments,
    table: &WeightTable,
    tokens: &[u32],
    progress: Progress,
) -> Result<()> {
    let all = quality::recipes(table);
    let bar = progress.bar("measuring", (all.len() * tokens.len()) as u64, "tokens");
    let mut rows = Vec::new();
    for (i, recipes) in all.iter().enumerate() {
        bar.set_message(recipes.to_string());
        let first = i * tokens.len();
        let row = quality::measure(backend, table, recipes, tokens, arguments.window, &mut |done| {
            bar.set_position((first + done) as u64);
        })?;
        rows.push(row);
    }
    bar.finish_and_clear();
    if arguments.json {
        return output::write_json(&json!({ "tokens": tokens.len(), "window": arguments.window, "recipes": rows }));
    }
    output::write(&quality::table(&rows).markdown())
}

fn tokens(arguments: &Arguments, dir: &std::path::Path, table: &WeightTable) -> Result<Vec<u32>> {
    let config = table.config();
    let read = |file: &std::path::Path| {
        let tokenizer = Tokenizer::from_file(dir.join("tokenizer.json"))?;
        corpus::from_text(file, &tokenizer, config)
    };
    let (mut tokens, limit) = match (&arguments.text, &arguments.token_ids) {
        (Some(file), _) => (read(file)?, None),
        (None, Some(file)) => (corpus::from_token_ids(file, config.vocab)?, None),
        (None, None) => (read(&shipped::held_out_documents()?)?, Some(DEFAULT_TOKENS)),
    };
    tokens.truncate(arguments.max_tokens.or(limit).unwrap_or(usize::MAX));
    Ok(tokens)
}

fn json(arguments: &Arguments, tokens: &[u32], verdict: &Verdict, weight_bytes: usize) -> Value {
    let mut fields = Map::new();
    let mut add = |name: &str, value: Value| fields.insert(name.to_owned(), value);
    let model = &verdict.model;
    add("nll", json!(model.nll()));
    add("perplexity", json!(model.perplexity()));
    add("tokens", json!(tokens.len()));
    add("scored", json!(model.scored()));
    add("window", json!(arguments.window));
    add("windows", json!(model.windows.len()));
    add("per_window", json!(model.per_window()));
    add("weights", json!(arguments.weights));
    add("weight_bytes", json!(weight_bytes));
    if arguments.per_token {
        add("token_nll", json!(per_token(model)));
    }
    if let (Some(recipe), Some((reference, agreement))) = (&arguments.reference, &verdict.reference) {
        let mut compared = json!({
            "weights": recipe,
            "nll": reference.nll(),
            "perplexity": reference.perplexity(),
            "kl": agreement.kl,
            "top1_agreement": agreement.top1_agreement,
        });
        if arguments.per_token {
            compared["token_nll"] = json!(per_token(reference));
        }
        add("reference", compared);
    }
    Value::Object(fields)
}

/// One value a token of the stream; `null` for the first of each window.
fn per_token(likelihood: &Likelihood) -> Vec<Option<f64>> {
    likelihood.windows.iter().flat_map(|w| std::iter::once(None).chain(w.iter().copied().map(Some))).collect()
}

fn report(arguments: &Arguments, tokens: &[u32], verdict: &Verdict, weight_bytes: usize) -> String {
    let columns = [
        ("weights", Align::Left),
        ("NLL", Align::Right),
        ("perplexity", Align::Right),
        ("KL", Align::Right),
        ("same top token", Align::Right),
    ];
    let shown = if verdict.reference.is_some() { &columns[..] } else { &columns[..3] };
    let mut table = Table::new(shown);
    let model = &verdict.model;
    let row = |recipe: &Recipes, l: &Likelihood, compared: [String; 2]| {
        let own = [recipe.to_string(), format!("{:.5}", l.nll()), format!("{:.4}", l.perplexity())];
        own.into_iter().chain(compared).take(shown.len())
    };
    let compared = verdict.reference.as_ref().map_or_else(Default::default, |(_, agreement)| {
        [format!("{:.5}", agreement.kl), format!("{:.2} %", 100.0 * agreement.top1_agreement)]
    });
    table.row(row(&arguments.weights, model, compared));
    if let (Some(recipe), Some((reference, _))) = (&arguments.reference, &verdict.reference) {
        table.row(row(recipe, reference, ["reference".to_owned(), String::new()]));
    }
    format!(
        "{} tokens in {} windows of {}, {} scored; NLL in nats a token; weights {}\n\n{table}",
        grouped(tokens.len() as u64),
        model.windows.len(),
        grouped(arguments.window as u64),
        grouped(model.scored() as u64),
        binary_size(weight_bytes as u64),
    )
}
