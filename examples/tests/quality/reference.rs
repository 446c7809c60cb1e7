//! The loaded model and the reference numbers, shared by all tests.

use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use ninfer_examples::shipped;
use ninfer_kernels::cpu::Cpu;
use ninfer_models::text::{Message, Text};
use ninfer_models::weights::WeightTable;
use ninfer_models::{Qwen35, Recipe, Session, SessionOptions};
use ninfer_spec::{Answer, Generator, Options};
use serde::Deserialize;
use serde::de::DeserializeOwned;

/// Longest prompt and answer of any test here.
const CONTEXT: usize = 512;

pub(crate) static MODEL: LazyLock<Qwen35<Cpu>> =
    LazyLock::new(|| Qwen35::load(&Cpu::new(), dir(), &Recipe::Keep, &mut |_| {}).unwrap());

pub(crate) static TEXT: LazyLock<Text> = LazyLock::new(|| Text::load(dir()).unwrap());

pub(crate) static GOLDEN: LazyLock<Golden> = LazyLock::new(|| fixture("golden.json"));

pub(crate) fn dir() -> PathBuf {
    shipped::model_or_shipped(None).unwrap()
}

pub(crate) fn table() -> WeightTable {
    WeightTable::open(dir()).unwrap()
}

pub(crate) fn fixture_path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

pub(crate) fn fixture<T: DeserializeOwned>(name: &str) -> T {
    serde_json::from_str(&std::fs::read_to_string(fixture_path(name)).unwrap()).unwrap()
}

#[derive(Deserialize)]
pub(crate) struct Golden {
    pub(crate) prompts: Vec<Prompt>,
}

/// A prompt and its greedy continuation.
#[derive(Deserialize)]
pub(crate) struct Prompt {
    pub(crate) name: String,
    pub(crate) messages: Option<Vec<Message>>,
    #[serde(rename = "prompt")]
    pub(crate) text: String,
    #[serde(rename = "prompt_ids")]
    pub(crate) ids: Vec<u32>,
    pub(crate) new_ids: Vec<u32>,
    pub(crate) stopped: String,
    #[serde(rename = "text")]
    pub(crate) answer: String,
    pub(crate) top1_margin: Vec<f64>,
}

impl Prompt {
    /// Steps that every f32 engine must take: up to the first whose two best logits are less than this apart.
    pub(crate) fn certain_steps(&self) -> usize {
        self.top1_margin.iter().position(|&margin| margin < 0.02).unwrap_or(self.top1_margin.len())
    }
}

pub(crate) fn session(max_drafts: usize) -> Session<Cpu> {
    let options = SessionOptions::new(CONTEXT).with_max_drafts(max_drafts).with_token_limit(TEXT.tokenizer().len());
    MODEL.session(&options).unwrap()
}

/// Answers with all tokens licensed.
pub(crate) fn answer(prompt: &[u32], max_drafts: usize, options: Options) -> Answer {
    let mut session = session(max_drafts);
    Generator::new(&mut session, options).unwrap().generate(prompt, |tokens| tokens.len()).unwrap()
}
