//! Decoding speed against what the memory of the machine can deliver.
//!
//! Without options: random weights of the smallest published shape, in BF16. With `--model-dir`: a checkpoint, plain and
//! with each number of MTP drafts.

#![allow(unreachable_pub, reason = "a program has no outside: `pub` means the whole of it")]

mod bandwidth;
mod checkpoint;
mod synthetic;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use ninfer_core::format::GroupFormat;
use ninfer_core::{WeightFormat, device};
use ninfer_examples::{Failure, Result, arguments, failure, output, shipped};
use ninfer_kernels::cpu::Cpu;
use ninfer_models::Recipe;
use serde_json::{Value, json};

/// Formats that `--format` knows by their names.
const FORMATS: [WeightFormat; 11] = [
    WeightFormat::F32,
    WeightFormat::F16,
    WeightFormat::Bf16,
    WeightFormat::Fp8Tensor,
    WeightFormat::Fp8Row,
    WeightFormat::Fp8Block,
    WeightFormat::Nvfp4,
    WeightFormat::Group(GroupFormat::Q4),
    WeightFormat::Group(GroupFormat::Q5),
    WeightFormat::Group(GroupFormat::Q6),
    WeightFormat::Group(GroupFormat::W8),
];

/// Measure decoding on the CPU, beside the memory-read bandwidth measured in the same run.
#[derive(Debug, Parser)]
#[command(name = "decode", version)]
struct Arguments {
    /// Published size whose shape the random weights have
    #[arg(long, value_name = "SIZE", default_value = "0.8b")]
    shape: String,
    /// Format of the random projections: f32, f16, bf16, fp8-tensor, fp8, fp8-block, nvfp4, q4, q5, q6 or w8
    #[arg(long, value_name = "FORMAT", default_value = "bf16", value_parser = format)]
    format: WeightFormat,
    /// Decode with a checkpoint, plain and by MTP, instead of with random weights [without DIR: the shipped model]
    #[arg(long, value_name = "DIR", conflicts_with_all = ["shape", "format", "prompt"])]
    model_dir: Option<Option<PathBuf>>,
    /// How the checkpoint's weights are converted at load
    #[arg(long, value_name = "RECIPE", default_value = "keep", requires = "model_dir")]
    weights: Recipe,
    /// Tokens in front of the measured ones
    #[arg(long, value_name = "N", default_value_t = 64)]
    prompt: usize,
    /// Tokens to decode, of each answer at most [default: 32, or 128 with a checkpoint]
    #[arg(long, value_name = "N")]
    new: Option<usize>,
    /// How often each setting is measured; the median counts
    #[arg(long, value_name = "N", default_value_t = 3)]
    repeat: usize,
    /// Threads of the backend [default: all]
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    /// Print one JSON object instead of tables
    #[arg(long)]
    json: bool,
}

fn format(name: &str) -> Result<WeightFormat, String> {
    FORMATS.into_iter().find(|f| f.name() == name).ok_or_else(|| FORMATS.map(WeightFormat::name).join(", "))
}

fn main() -> ExitCode {
    match arguments::parse::<Arguments>() {
        Ok(arguments) => failure::exit(run(&arguments)),
        Err(status) => status,
    }
}

/// What was measured, for people and for programs.
struct Measured {
    table: String,
    json: Value,
}

fn run(arguments: &Arguments) -> Result<()> {
    let new = arguments.new.unwrap_or(if arguments.model_dir.is_some() { 128 } else { 32 });
    if new < 2 || arguments.prompt == 0 || arguments.repeat == 0 {
        return Err(Failure::usage("nothing to measure", "give --new 2 or more, and --prompt and --repeat 1 or more"));
    }
    let cpu = match arguments.threads {
        Some(threads) => Cpu::with_threads(threads)?,
        None => Cpu::new(),
    };
    // Before anything else keeps the memory busy.
    let probe = device::measure_cpu_read_bandwidth().ok_or_else(|| {
        Failure::usage("the memory-read bandwidth could not be measured", "free some memory and try again")
    })?;
    let probe = probe.bytes_per_second;
    let long = bandwidth::read();
    // A short probe can be disturbed, so the share is that of the faster one.
    let best = probe.max(long);
    let measured = match &arguments.model_dir {
        None => {
            let options = synthetic::Options {
                size: &arguments.shape,
                format: arguments.format,
                prompt: arguments.prompt,
                new,
                repeat: arguments.repeat,
            };
            synthetic::measure(&cpu, &options, best)?
        }
        Some(dir) => {
            let dir = shipped::model_or_shipped(dir.as_deref())?;
            checkpoint::measure(&cpu, &dir, &arguments.weights, new, arguments.repeat)?
        }
    };
    let threads = arguments.threads.map_or_else(|| "all".to_owned(), |n| n.to_string());
    if arguments.json {
        return output::write_json(&json!({
            "probe_bytes_per_second": probe,
            "long_read_bytes_per_second": long,
            "threads": threads,
            "measured": measured.json,
        }));
    }
    let (probe, long) = (probe / 1e9, long / 1e9);
    let head = format!("memory read {probe:.2} GB/s (probe), {long:.2} GB/s (long read); threads: {threads}");
    output::write(&format!("{head}\n\n{}", measured.table))
}

/// The middle one, or the upper of the two middle ones; 0 of nothing.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_middle_one() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(vec![2.0, 1.0]), 2.0);
        assert_eq!(median(Vec::new()), 0.0);
    }

    #[test]
    fn options_are_read() {
        let parse = |args: &[&str]| Arguments::try_parse_from([&["decode"], args].concat());
        assert_eq!(parse(&[]).unwrap().format, WeightFormat::Bf16);
        assert_eq!(parse(&["--format", "q4"]).unwrap().format, WeightFormat::Group(GroupFormat::Q4));
        assert_eq!(parse(&["--model-dir"]).unwrap().model_dir, Some(None));
        assert_eq!(parse(&["--model-dir", "x", "--weights", "q4"]).unwrap().model_dir, Some(Some("x".into())));
        assert!(parse(&["--format", "q3"]).is_err());
        assert!(parse(&["--model-dir", "x", "--format", "q4"]).is_err());
    }
}
