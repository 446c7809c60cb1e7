//! An earlier run against this one.

use ninfer_examples::table::{Align, Table};

use crate::report::Report;

/// What differs between the runs beside what is measured, a line each, and the rows that both have.
pub fn compare(earlier: &Report, now: &Report) -> String {
    let mut text = String::from("Against the earlier run (ratio of tok/s; shares are of the ceilings of each run)\n");
    for (what, before, after) in [
        ("device", &earlier.device.name, &now.device.name),
        ("model", &earlier.model, &now.model),
        ("recipe", &earlier.format, &now.format),
        ("library", &earlier.library, &now.library),
    ] {
        if before != after {
            text.push_str(&format!("other {what}: {before}, now {after}\n"));
        }
    }
    let heads = ["tok/s before", "now", "ratio", "share before", "now"];
    let columns: Vec<_> =
        std::iter::once(("", Align::Left)).chain(heads.into_iter().map(|h| (h, Align::Right))).collect();
    let mut table = Table::new(&columns);
    for row in &now.rows {
        let before = earlier.rows.iter().find(|r| r.key() == row.key());
        let or_dash = |cell: Option<String>| cell.unwrap_or_else(|| "-".to_owned());
        table.row([
            row.name(),
            or_dash(before.map(|b| format!("{:.1}", b.tokens_per_second))),
            format!("{:.1}", row.tokens_per_second),
            or_dash(before.map(|b| format!("{:.3}", row.tokens_per_second / b.tokens_per_second))),
            or_dash(before.map(|b| format!("{:.3}", b.share))),
            format!("{:.3}", row.share),
        ]);
    }
    let gone = earlier.rows.iter().filter(|b| now.rows.iter().all(|r| r.key() != b.key())).count();
    text.push_str(&format!("\n{table}"));
    if gone > 0 {
        text.push_str(&format!("{gone} more of the earlier run were not measured\n"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Kind;
    use crate::report::tests::{report, row};

    #[test]
    fn rows_are_matched_by_what_they_measure() {
        let earlier = report(vec![row(Kind::Decode, 512, 2e-3), row(Kind::Decode, 7680, 4e-3)]);
        let mut other = row(Kind::Decode, 512, 1e-3);
        other.kv = "bf16".to_owned();
        let mut now = report(vec![row(Kind::Decode, 512, 1e-3), other]);
        now.model = "35b-a3b".to_owned();
        let text = compare(&earlier, &now);
        let line = |start: &str| text.lines().find(|l| l.starts_with(start)).unwrap_or_default().to_owned();
        let cells = |start: &str| line(start).split("  ").map(str::trim).filter(|c| !c.is_empty()).count();
        assert_eq!(cells("decode behind 512, i8"), 6);
        assert!(line("decode behind 512, i8").contains("500.0  1000.0  2.000"), "{text}");
        assert!(line("decode behind 512, bf16").contains("-  1000.0      -"), "{text}");
        assert!(text.contains("other model: 27b, now 35b-a3b\n"), "{text}");
        assert!(text.ends_with("1 more of the earlier run were not measured\n"), "{text}");
        assert!(!text.contains("other device"), "{text}");
    }
}
