//! Converts a checkpoint folder: quantised weights that this and other engines load.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use ninfer_core::memory::binary_size;
use ninfer_examples::progress::Progress;
use ninfer_examples::quantize::{Job, Planned};
use ninfer_examples::recipes::Recipes;
use ninfer_examples::size::Size;
use ninfer_examples::table::{Align, Table, grouped};
use ninfer_examples::{Failure, Result, arguments, failure, output, shipped};
use serde_json::Value;

const EXAMPLES: &str = "\
Examples:
  quantize --weights nvfp4 --output demo-nvfp4
      The shipped model in NVFP4, as compressed-tensors stores it. Then: generate --model demo-nvfp4
  quantize --model ~/models/Qwen3.6-35B-A3B --weights fp8-block --output ~/models/Qwen3.6-35B-A3B-fp8
      FP8 with 128×128 blocks, in the form of Qwen's own FP8 releases.
  quantize --model ~/models/Qwen3.5-9B --weights q5 --output q5 --report q5.json --shard-size 2GB
      Five-bit integers, files of at most 2 GB, and the error of every matrix in q5.json.
  quantize --model ~/models/Qwen3.6-27B-NVFP4 --weights bridge-fp8 --output bridged
      An NVFP4 checkpoint for devices that multiply FP8 but not FP4.
  quantize --model ~/models/Qwen3.5-4B --weights w8 --output w8 --dry-run
      What would be written, and how large it would be.

The output is written to OUTPUT.partial and renamed when it is complete. Matrices are converted a few at a time, so the
memory needed is at most three times the largest tensor and 256 MiB.
Exit status: 0, or 1 for an error, or 2 for a command line that is not legal.";

/// Convert a checkpoint to another weight format.
#[derive(Debug, Parser)]
#[command(name = "quantize", version, after_help = EXAMPLES)]
struct Arguments {
    /// Folder of a checkpoint [default: the shipped model]
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// Folder to make
    #[arg(long, value_name = "DIR")]
    output: PathBuf,
    /// Formats of the weights: keep, bf16, f32, q4, q5, q6, w8, groupwise, nvfp4, fp8, fp8-block, bridge-fp8, bridge-fp8-block,
    /// bridge-fp8-amax; with -a8 behind one of FP8 also E4M3 activations; or a file of rules, *.toml; or several of them in a row,
    /// separated by commas
    #[arg(long, value_name = "RECIPE")]
    weights: Recipes,
    /// Largest file of weights, such as 5GB or 512MiB; a larger tensor has a file of its own
    #[arg(long, value_name = "SIZE", default_value = "5GB")]
    shard_size: Size,
    /// Replace the output, and what an interrupted run has left of it
    #[arg(long)]
    force: bool,
    /// Say what would be written, and write nothing
    #[arg(long)]
    dry_run: bool,
    /// Write the error of every matrix to a JSON file
    #[arg(long, value_name = "FILE.json", conflicts_with = "dry_run")]
    report: Option<PathBuf>,
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
    let job = Job {
        model: shipped::model_or_shipped(arguments.model.as_deref())?,
        output: arguments.output.clone(),
        recipes: arguments.weights.clone(),
        shard_bytes: arguments.shard_size.0,
        force: arguments.force,
    };
    let planned = job.plan()?;
    if arguments.dry_run {
        return match arguments.json {
            true => output::write_json(&planned.facts()?),
            false => output::write(&forecast(&planned)?),
        };
    }

    let progress = Progress::new(!arguments.json && !arguments.quiet);
    let bar = progress.bar("converting", planned.input_bytes(), "bytes");
    let summary = planned.run(&mut |step| {
        bar.inc(step.bytes);
        bar.set_message(step.name.to_owned());
        Ok(())
    });
    bar.finish_and_clear();
    let summary = summary?;

    let mut facts = planned.facts()?;
    if let (Value::Object(facts), Value::Object(errors)) = (&mut facts, summary.json()) {
        facts.extend(errors);
    }
    if let Some(file) = &arguments.report {
        std::fs::write(file, format!("{facts:#}\n")).map_err(|e| Failure::unwritable(file, &e))?;
    }
    if arguments.json {
        return output::write_json(&facts);
    }
    let files = planned.files()?;
    output::write(&format!(
        "{}\n{} read, {} written to {} in {}\n",
        summary.table(),
        binary_size(planned.input_bytes()),
        binary_size(planned.plan().output_bytes()),
        job.output.display(),
        if files.len() == 1 { "one file".to_owned() } else { format!("{} files", files.len()) },
    ))
}

/// Files and formats of an output that is not written.
fn forecast(planned: &Planned<'_>) -> Result<String> {
    let mut formats = Table::new(&[
        ("stored", Align::Left),
        ("written", Align::Left),
        ("matrices", Align::Right),
        ("weights", Align::Right),
    ]);
    let mut rows: Vec<(&str, String, u64, u64)> = Vec::new();
    for (place, outcome) in planned.plan().matrices() {
        let (from, to) = (place.stored.name(), outcome.formats());
        let weights = (place.rows as u64).saturating_mul(place.cols as u64);
        match rows.iter_mut().find(|row| (row.0, &row.1) == (from, &to)) {
            Some(row) => (row.2, row.3) = (row.2 + 1, row.3.saturating_add(weights)),
            None => rows.push((from, to, 1, weights)),
        }
    }
    for (from, to, count, weights) in rows {
        formats.row([from.to_owned(), to, grouped(count), grouped(weights)]);
    }
    let mut files = Table::new(&[("file", Align::Left), ("bytes", Align::Right)]);
    for (name, bytes) in planned.files()? {
        files.row([name, grouped(bytes)]);
    }
    let method = planned.quantization_config();
    let method = method.as_ref().and_then(|c| c.get("quant_method")?.as_str());
    Ok(format!(
        "{formats}\n{files}\n{} in {} tensors, read from {}; quantization_config: {}\n",
        binary_size(planned.plan().output_bytes()),
        grouped(planned.plan().tensors().len() as u64),
        binary_size(planned.input_bytes()),
        method.unwrap_or(if planned.plan().is_copy() { "as it is" } else { "none" }),
    ))
}
