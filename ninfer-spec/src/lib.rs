#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]
#![forbid(unsafe_code)]

mod accept;
mod clock;
mod controller;
mod cost;
mod error;
mod looping;
mod mtp;
mod ngram;

pub use accept::{AcceptRule, Columns, MatchRule, RejectionRule, Verdict};
pub use clock::{Clock, SystemClock};
pub use controller::{Controller, LARGEST_LOSS, Observation, WINDOW};
pub use cost::CostTable;
pub use error::{Error, Result};
pub use looping::LoopDetector;
pub use mtp::MtpDrafter;
pub use ngram::{MAX_NGRAM, NgramDrafter};
