#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]
#![forbid(unsafe_code)]

mod accept;
mod cancel;
mod clock;
mod controller;
mod cost;
mod error;
mod generator;
mod host;
mod looping;
mod mtp;
mod ngram;
mod options;
mod request;
mod running;
mod sequence;
mod statistics;

pub use accept::{AcceptRule, Columns, MatchRule, RejectionRule, Verdict};
pub use cancel::Cancel;
pub use clock::{Clock, SystemClock};
pub use controller::{Controller, LARGEST_LOSS, Observation, WINDOW};
pub use cost::CostTable;
pub use error::{Error, Result};
pub use generator::Generator;
pub use looping::LoopDetector;
pub use mtp::MtpDrafter;
pub use ngram::{MAX_NGRAM, NgramDrafter};
pub use options::{Drafts, FinishReason, Options};
pub use request::Request;
pub use running::{Answer, Running, Step};
pub use sequence::{Counts, Sequence};
pub use statistics::{SUSPICIOUS_ACCEPTANCE, Statistics};
