//! Every operation of the CPU backend against golden tensors and an independent f64 oracle, and the promises that hold
//! between calls: width invariance, record and fold, refusal of bad arguments and bad device data.

// Modules of a test program reach nobody else.
#![allow(unreachable_pub)]

mod close;
mod fixture;
mod lab;
mod oracle;
mod rng;
mod stored;
mod tiny;

mod activations;
mod attention;
mod attention_codes;
mod bad_data;
mod busy;
mod fold;
mod gdn;
mod gdn_edges;
mod golden;
mod golden_gdn;
mod hostile;
mod linear;
mod moe;
mod norm;
mod recording;
mod sample;
mod width;
