//! Behaviour of the formats: exact values of published layouts, round trips, bounds, and input that must be refused.

#![allow(clippy::redundant_pub_crate, reason = "unreachable_pub asks for the opposite in a test binary")]

mod bridge;
mod custom;
mod demo_model;
mod experts;
mod fixtures;
mod fp8;
mod hostile;
mod int4;
mod nvfp4;
mod recipes;
mod round_trips;
mod tables;
mod writing;
