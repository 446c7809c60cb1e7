//! A whole model of a published shape on a GPU, with random weights made there, against what its memory can deliver.
//!
//! ```sh
//! cargo run --release -p ninfer-benches --features cuda --bin roofline -- --model 35b-a3b --prompt 7680 --new 256
//! ```
//!
//! Prefill, plain decoding and rounds of drafts by MTP. With random weights acceptance means nothing, so the bench says
//! how many tokens of a round count: a coin of the given probability for each draft, until the first that fails.

use std::time::Instant;

use clap::Parser;
use ninfer_benches::{Random, shape_config};
use ninfer_core::memory::KvFormat;
use ninfer_core::model::{CausalModel, LaneOptions, PrefillEnd, RoundRow};
use ninfer_core::roofline::{self, RoundOptions};
use ninfer_core::shape::published;
use ninfer_core::{Backend, DType, WeightFormat};
use ninfer_examples::table::{Align, Table};
use ninfer_examples::{Failure, Result, arguments, failure, output};
use ninfer_kernels::cuda::Cuda;
use ninfer_models::qwen35::SyntheticWeights;
use ninfer_models::{Config, Qwen35, Recipe, Session, SessionOptions};
use serde_json::json;

/// Rounds before the measured ones: the first is recorded.
const WARM_UP: usize = 3;

/// Measure a whole model with random weights on a GPU.
#[derive(Debug, Parser)]
#[command(name = "roofline", version)]
#[command(
    after_help = "Examples:\n  roofline --model 27b --format groupwise --prompt 7680 --new 256\n  roofline --model 35b-a3b --spec-k 3 --acceptance 0.7 --kv i8"
)]
struct Arguments {
    /// Published size
    #[arg(long, default_value = "35b-a3b", value_name = "SIZE")]
    model: String,
    /// Recipe of the weights
    #[arg(long, default_value = "groupwise", value_name = "RECIPE")]
    format: Recipe,
    /// Tokens of the prompt
    #[arg(long, default_value_t = 7680, value_name = "N")]
    prompt: usize,
    /// Tokens to decode
    #[arg(long, default_value_t = 256, value_name = "N")]
    new: usize,
    /// Drafts of a round; 0 measures plain decoding alone
    #[arg(long, default_value_t = 3, value_name = "K")]
    spec_k: usize,
    /// Probability with which the bench counts a draft as accepted
    #[arg(long, default_value_t = 0.7, value_name = "P")]
    acceptance: f64,
    /// Rows of a prompt chunk
    #[arg(long, default_value_t = 1024, value_name = "N")]
    chunk: usize,
    /// Storage of the KV cache: bf16, i8 or fp8
    #[arg(long, default_value = "i8", value_parser = ["bf16", "i8", "fp8"])]
    kv: String,
    /// Number of the GPU
    #[arg(long, default_value_t = 0, value_name = "N")]
    device: u32,
    /// Print one JSON object instead of a table
    #[arg(long)]
    json: bool,
}

fn main() -> std::process::ExitCode {
    match arguments::parse::<Arguments>() {
        Ok(arguments) => failure::exit(run(&arguments)),
        Err(status) => status,
    }
}

/// What was measured.
struct Measured {
    prefill: f64,
    /// Seconds of each plain round.
    plain: Vec<f64>,
    /// Seconds of each round with drafts.
    rounds: Vec<f64>,
    /// Tokens that those rounds count.
    tokens: usize,
}

fn run(arguments: &Arguments) -> Result<()> {
    if arguments.new < 2 || arguments.prompt == 0 {
        return Err(Failure::usage("nothing to measure", "give --new 2 or more and --prompt 1 or more"));
    }
    let (dtype, kv) = match arguments.kv.as_str() {
        "bf16" => (DType::Bf16, KvFormat::Bf16),
        "fp8" => (DType::F8E4M3, KvFormat::Fp8),
        _ => (DType::I8, KvFormat::Int8G64),
    };
    let gpu = Cuda::new(arguments.device)?;
    let bandwidth = gpu.measure_bandwidth()?;
    let copy = bandwidth.copy.bytes_per_second;
    let shape = published(&arguments.model)?;
    let config = Config::from_json_str(&shape_config(&shape).to_string())?;
    let source = SyntheticWeights::with_recipe(config, arguments.format.clone(), 1);
    let start = Instant::now();
    let model = Qwen35::from_source(&gpu, &source, &mut |_| {})?;
    gpu.finish_loading();
    let load = start.elapsed().as_secs_f64();

    let context = arguments.prompt + 2 * (arguments.new + WARM_UP) * (arguments.spec_k + 1) + 64;
    let options = SessionOptions::new(context)
        .with_max_drafts(arguments.spec_k)
        .with_prefill_chunk(arguments.chunk)
        .with_kv_dtype(dtype)
        .with_mtp(arguments.spec_k > 0);
    let mut session = model.session(&options)?;
    let measured = measure(&mut session, arguments, context)?;

    let formats = arguments.format.formats(&shape, |_| WeightFormat::Bf16);
    let middle = arguments.prompt + arguments.new / 2;
    let bytes = roofline::bytes_per_token(&shape, formats, middle, kv)?.total();
    let plain = median(&measured.plain);
    let mut table =
        Table::new(&[("", Align::Left), (&format!("{} {}", arguments.model, arguments.format), Align::Right)]);
    let mut row = |name: &str, value: String| table.row([name.to_owned(), value]);
    row("device", gpu.device().name.clone());
    row("copy, read bandwidth, GB/s", format!("{:.0}, {:.0}", copy / 1e9, bandwidth.read.bytes_per_second / 1e9));
    row("weights, GB; made in s", format!("{:.2}; {load:.1}", model.weight_bytes() as f64 / 1e9));
    row("prompt, chunk, KV", format!("{}, {}, {}", arguments.prompt, arguments.chunk, kv));
    row("prefill tok/s", format!("{:.0}", arguments.prompt as f64 / measured.prefill));
    row("plain decode tok/s", format!("{:.1}", 1.0 / plain));
    row("bytes a token, GB", format!("{:.3}", bytes as f64 / 1e9));
    row("share of the copy bandwidth", format!("{:.3}", roofline::share(bytes, plain, copy)));
    let mut json = json!({
        "device": gpu.device(),
        "model": arguments.model,
        "format": arguments.format.to_string(),
        "kv": kv,
        "prompt": arguments.prompt,
        "chunk": arguments.chunk,
        "copy_bytes_per_second": copy,
        "read_bytes_per_second": bandwidth.read.bytes_per_second,
        "weight_bytes": model.weight_bytes(),
        "prefill_tokens_per_second": arguments.prompt as f64 / measured.prefill,
        "decode_tokens_per_second": 1.0 / plain,
        "bytes_per_token": bytes,
        "decode_share": roofline::share(bytes, plain, copy),
    });
    if !measured.rounds.is_empty() {
        let round = median(&measured.rounds);
        let options = RoundOptions::new(&shape, middle, arguments.spec_k).with_kv(kv);
        let moved = roofline::bytes_per_round(&shape, formats, &options)?.total();
        let mean = measured.tokens as f64 / measured.rounds.len() as f64;
        row("drafts, acceptance by coin", format!("{}, {:.2}", arguments.spec_k, arguments.acceptance));
        row("round, ms; in plain steps", format!("{:.3}; {:.2}", round * 1e3, round / plain));
        row("tokens a round, tok/s", format!("{mean:.2}, {:.1}", mean / round));
        row("bytes a round, GB", format!("{:.3}", moved as f64 / 1e9));
        row("share of the copy bandwidth, round", format!("{:.3}", roofline::share(moved, round, copy)));
        json["round_seconds"] = json!(round);
        json["round_share"] = json!(roofline::share(moved, round, copy));
        json["tokens_per_round"] = json!(mean);
    }
    if arguments.json {
        return output::write_json(&json);
    }
    output::write(&table.to_string())
}

fn measure(session: &mut Session<Cuda>, arguments: &Arguments, context: usize) -> Result<Measured> {
    let vocab = session.limits().vocab as u32;
    let mut random = Random::new(1);
    let prompt: Vec<u32> = (0..arguments.prompt).map(|_| random.below(vocab)).collect();
    // Kernels are compiled by the driver when they are first used, and which are depends on the context.
    let mut lane = session.open_lane(&LaneOptions::new(context))?;
    session.prefill(&mut lane, &prompt, PrefillEnd::Choose { drafts: 0 }, None)?;
    drop(lane);
    let mut lane = session.open_lane(&LaneOptions::new(context))?;
    let start = Instant::now();
    let first = session.prefill(&mut lane, &prompt, PrefillEnd::Choose { drafts: 0 }, None)?;
    let prefill = start.elapsed().as_secs_f64();
    let no_token = || Failure::usage("a round emitted no token", "check the session");
    let mut anchor = first.and_then(|o| o.tokens.last().copied()).ok_or_else(no_token)?;

    let mut plain = Vec::new();
    for i in 0..WARM_UP + arguments.new {
        let start = Instant::now();
        let mut lanes = [&mut lane];
        let outcomes = session.verify(&mut lanes, &[RoundRow::new(anchor)])?.commit(&[1])?;
        if i >= WARM_UP {
            plain.push(start.elapsed().as_secs_f64());
        }
        anchor = outcomes.first().and_then(|o| o.tokens.last().copied()).ok_or_else(no_token)?;
    }
    let (mut rounds, mut tokens) = (Vec::new(), 0);
    if arguments.spec_k > 0 {
        // Hidden states of the last tokens only are kept, so MTP starts from a prompt of its own.
        drop(lane);
        let mut lane = session.open_lane(&LaneOptions::new(context))?;
        let end = PrefillEnd::Choose { drafts: arguments.spec_k };
        let first = session.prefill(&mut lane, &prompt, end, None)?.ok_or_else(no_token)?;
        let mut anchor = first.tokens.last().copied().ok_or_else(no_token)?;
        let mut drafts: Vec<u32> = first.drafts.to_vec();
        for i in 0..WARM_UP + arguments.new {
            let start = Instant::now();
            let mut lanes = [&mut lane];
            let row = RoundRow::new(anchor).with_drafts(&drafts).with_next_drafts(arguments.spec_k);
            let outcomes = session.verify(&mut lanes, &[row])?.commit(&[1])?;
            if i >= WARM_UP {
                rounds.push(start.elapsed().as_secs_f64());
                let mut accepted = 0;
                while accepted < drafts.len() && f64::from(random.uniform()) * 0.5 + 0.5 < arguments.acceptance {
                    accepted += 1;
                }
                tokens += accepted + 1;
            }
            let outcome = outcomes.first().ok_or_else(no_token)?;
            anchor = outcome.tokens.first().copied().ok_or_else(no_token)?;
            drafts = outcome.drafts.to_vec();
        }
    }
    Ok(Measured { prefill, plain, rounds, tokens })
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(0.0)
}
