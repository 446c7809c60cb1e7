//! The table in docs/tuning.md is the one that the code gives.

use std::path::Path;

use ninfer_core::{known, tuning};

/// Devices of the columns, by the names of their profiles.
const DEVICES: [&str; 3] = ["gb10", "h200", "rtx-5090"];

/// A value with groups of three digits.
fn grouped(value: u64) -> String {
    let digits = value.to_string();
    let groups: Vec<&str> = digits.as_bytes().rchunks(3).rev().filter_map(|g| std::str::from_utf8(g).ok()).collect();
    groups.join(",")
}

fn expected() -> String {
    let devices = DEVICES.map(|name| known::profile(name).unwrap().device_info());
    let tables = devices.each_ref().map(tuning::table);
    let mut text = String::from("| what | formula | kind |");
    for d in &devices {
        text.push_str(&format!(" {} ({} SM) |", d.name, d.sm_count));
    }
    text.push_str("\n|---|---|---|---:|---:|---:|\n");
    for (i, row) in tables[0].iter().enumerate() {
        let values = tables.each_ref().map(|t| grouped(t[i].value)).join(" | ");
        text.push_str(&format!("| {} | {} | {} | {values} |\n", row.name, row.formula, row.effect));
    }
    text
}

#[test]
fn the_document_has_the_table_of_the_code() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/tuning.md");
    let text = std::fs::read_to_string(file).unwrap();
    let expected = expected();
    assert!(text.contains(&expected), "docs/tuning.md should have\n{expected}");
}

#[test]
fn digits_are_grouped() {
    assert_eq!([0, 999, 1000, 1_234_567].map(grouped), ["0", "999", "1,000", "1,234,567"]);
}
