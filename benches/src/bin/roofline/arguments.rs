//! The command line.

use std::path::PathBuf;
use std::str::FromStr;

use clap::{Parser, ValueEnum};
use ninfer_core::DType;
use ninfer_core::memory::KvFormat;
use ninfer_core::segment::MAX_STEP_ROWS;
use ninfer_examples::arguments::{from, within};
use ninfer_examples::{Failure, Result};
use ninfer_models::Recipe;

/// Most rows of a prompt chunk that a session takes.
const MOST_ROWS: usize = 1 << 16;

/// Measure a whole model with random weights on a GPU.
#[derive(Debug, Parser)]
#[command(name = "roofline", version)]
#[command(after_help = "Examples:\n  roofline --model 27b --format groupwise --prompt 7680 --new 256\n  \
                  roofline --model 35b-a3b --prompt 512,7680,65536 --kv i8,bf16 --chunk 1024,2048,4096,full\n  \
                  roofline --model 35b-a3b --breakdown --sequences 1,2,4,8,16 --save now.json --compare before.json")]
pub struct Arguments {
    /// Published size
    #[arg(long, default_value = "35b-a3b", value_name = "SIZE")]
    pub model: String,
    /// Recipe of the weights
    #[arg(long, default_value = "groupwise", value_name = "RECIPE")]
    pub format: Recipe,
    /// Tokens of the prompt, a list; decoding is measured behind each
    #[arg(long, default_value = "7680", value_name = "N,…", value_delimiter = ',', value_parser = from(1))]
    pub prompt: Vec<usize>,
    /// Tokens to decode
    #[arg(long, default_value_t = 256, value_name = "N", value_parser = from(2))]
    pub new: usize,
    /// Drafts of a round; 0 measures plain decoding alone
    #[arg(long, default_value_t = 3, value_name = "K", value_parser = within(0, 15))]
    pub spec_k: usize,
    /// Probability with which the bench counts a draft as accepted
    #[arg(long, default_value_t = 0.7, value_name = "P", value_parser = probability)]
    pub acceptance: f64,
    /// Rows of a prompt chunk, a list; `full` is the whole prompt at once [default: what the device suggests]
    #[arg(long, value_name = "N,…", value_delimiter = ',')]
    pub chunk: Vec<Chunk>,
    /// Storage of the KV cache, a list
    #[arg(long, default_value = "i8", value_name = "FORMAT,…", value_delimiter = ',')]
    pub kv: Vec<Kv>,
    /// Prefills of which the median counts
    #[arg(long, default_value_t = 3, value_name = "N", value_parser = from(1))]
    pub repeat: usize,
    /// Also decode so many sequences in one step, a list, each behind a prompt of the first length
    #[arg(long, value_name = "N,…", value_delimiter = ',', value_parser = within(1, MAX_STEP_ROWS as u64))]
    pub sequences: Vec<usize>,
    /// Also time each kernel of a step
    #[arg(long)]
    pub breakdown: bool,
    /// Also print how the rows stand to those of an earlier JSON file
    #[arg(long, value_name = "FILE")]
    pub compare: Option<PathBuf>,
    /// Write the JSON object to a file
    #[arg(long, value_name = "FILE")]
    pub save: Option<PathBuf>,
    /// Number of the GPU
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub device: u32,
    /// Print one JSON object instead of tables
    #[arg(long)]
    pub json: bool,
}

impl Arguments {
    /// Fails for lists with equal entries, whose rows could not be told apart.
    pub fn check(&self) -> Result<()> {
        distinct("--prompt", &self.prompt)?;
        distinct("--kv", &self.kv)?;
        distinct("--chunk", &self.chunk)?;
        distinct("--sequences", &self.sequences)
    }
}

fn distinct<T: PartialEq>(option: &str, list: &[T]) -> Result<()> {
    match list.iter().enumerate().any(|(i, x)| list[..i].contains(x)) {
        true => Err(Failure::usage(format!("{option} names a value twice"), "give each value once")),
        false => Ok(()),
    }
}

fn probability(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(p) if (0.0..=1.0).contains(&p) => Ok(p),
        _ => Err("a number from 0 to 1".to_owned()),
    }
}

/// Rows of a prompt chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Chunk {
    /// So many.
    Rows(usize),
    /// The whole prompt, as far as a session takes so many rows.
    Full,
}

impl Chunk {
    /// Rows for a prompt.
    pub fn rows(self, prompt: usize) -> usize {
        match self {
            Self::Rows(rows) => rows,
            Self::Full => prompt.clamp(1, MOST_ROWS),
        }
    }
}

impl FromStr for Chunk {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "full" {
            return Ok(Self::Full);
        }
        match text.parse() {
            Ok(rows) if (1..=MOST_ROWS).contains(&rows) => Ok(Self::Rows(rows)),
            _ => Err(format!("1 to {MOST_ROWS}, or full")),
        }
    }
}

impl std::fmt::Display for Chunk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Rows(rows) => rows.fmt(f),
            Self::Full => f.pad("full"),
        }
    }
}

/// Storage of the KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Kv {
    /// BF16.
    Bf16,
    /// Signed bytes with a scale for 64.
    I8,
    /// FP8 E4M3.
    Fp8,
}

impl Kv {
    /// Type of the elements, for a session.
    pub const fn dtype(self) -> DType {
        match self {
            Self::Bf16 => DType::Bf16,
            Self::I8 => DType::I8,
            Self::Fp8 => DType::F8E4M3,
        }
    }

    /// Format, for its bytes.
    pub const fn format(self) -> KvFormat {
        match self {
            Self::Bf16 => KvFormat::Bf16,
            Self::I8 => KvFormat::Int8G64,
            Self::Fp8 => KvFormat::Fp8,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Arguments, clap::Error> {
        Arguments::try_parse_from(std::iter::once("roofline").chain(line.split_whitespace()))
    }

    #[test]
    fn lists_are_read() {
        let a = parse("--prompt 512,7680,65536 --kv bf16,i8,fp8 --chunk 1024,full --sequences 1,16").unwrap();
        assert_eq!(a.prompt, [512, 7680, 65536]);
        assert_eq!(a.kv, [Kv::Bf16, Kv::I8, Kv::Fp8]);
        assert_eq!(a.chunk, [Chunk::Rows(1024), Chunk::Full]);
        assert_eq!(a.sequences, [1, 16]);
        assert!(a.check().is_ok());
        let plain = parse("").unwrap();
        assert_eq!(
            (plain.prompt, plain.kv, plain.chunk.len(), plain.sequences.len()),
            (vec![7680], vec![Kv::I8], 0, 0)
        );
    }

    #[test]
    fn what_cannot_be_measured_is_refused() {
        for line in [
            "--prompt 0",
            "--prompt 1,x",
            "--new 1",
            "--chunk 0",
            "--chunk 65537",
            "--chunk all",
            "--kv i4",
            "--sequences 0",
            "--sequences 129",
            "--spec-k 16",
            "--acceptance 1.5",
            "--acceptance NaN",
            "--repeat 0",
        ] {
            assert!(parse(line).is_err(), "{line}");
        }
        for line in ["--prompt 7,7", "--kv i8,i8", "--chunk full,full", "--sequences 2,2"] {
            assert!(parse(line).unwrap().check().is_err(), "{line}");
        }
    }

    #[test]
    fn a_full_chunk_is_the_prompt() {
        assert_eq!([Chunk::Full.rows(512), Chunk::Full.rows(1 << 17), Chunk::Rows(64).rows(7)], [512, 1 << 16, 64]);
        assert_eq!(format!("{} {}", Chunk::Full, Chunk::Rows(1024)), "full 1024");
    }
}
