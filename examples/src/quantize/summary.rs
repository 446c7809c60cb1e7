//! What the conversion cost, matrix by matrix and folded.

use ninfer_quant::{ErrorReport, ErrorSums};
use serde::Serialize;
use serde_json::{Value, json};

use super::execute::Converted;
use crate::inventory::pattern;
use crate::table::{Align, Table, grouped};

/// Errors of all matrices that were converted.
#[derive(Debug)]
pub struct Summary {
    converted: Vec<Converted>,
}

/// Matrices of one name pattern, before and after.
#[derive(Debug)]
struct Group {
    name: String,
    from: &'static str,
    to: String,
    count: usize,
    input_bytes: u64,
    output_bytes: u64,
    sums: ErrorSums,
    worst_l2: f64,
    worst_cosine: f64,
}

/// A matrix of the report.
#[derive(Serialize)]
struct Line<'a> {
    name: &'a str,
    role: &'static str,
    shape: [usize; 2],
    stored: &'a str,
    written: &'a str,
    input_bytes: u64,
    output_bytes: u64,
    error: ErrorReport,
}

impl Summary {
    pub(super) fn new(converted: Vec<Converted>) -> Self {
        Self { converted }
    }

    /// The matrices in the order of the file.
    #[must_use]
    pub fn converted(&self) -> &[Converted] {
        &self.converted
    }

    /// A line for each name pattern, numbers written `*`, and one for all.
    #[must_use]
    pub fn table(&self) -> Table {
        let (left, right) = (Align::Left, Align::Right);
        let mut table = Table::new(&[
            ("matrices", left),
            ("count", right),
            ("stored", left),
            ("written", left),
            ("bytes", right),
            ("bytes", right),
            ("relative L2", right),
            ("worst", right),
            ("max |error|", right),
            ("cosine", right),
            ("worst", right),
        ]);
        let groups = self.groups();
        for g in &groups {
            table.row(g.cells());
        }
        if groups.len() > 1 {
            let mut all = Group::new("all", "", "");
            groups.iter().for_each(|g| all.merge(g));
            table.row(all.cells());
        }
        table
    }

    /// Every matrix with its errors.
    #[must_use]
    pub fn json(&self) -> Value {
        let lines: Vec<Line<'_>> = self
            .converted
            .iter()
            .map(|c| Line {
                name: &c.name,
                role: c.role.name(),
                shape: c.shape,
                stored: c.from,
                written: &c.to,
                input_bytes: c.input_bytes,
                output_bytes: c.output_bytes,
                error: c.error(),
            })
            .collect();
        let mut all = ErrorSums::default();
        self.converted.iter().for_each(|c| all.merge(&c.sums));
        json!({ "matrices": lines, "all": all.report() })
    }

    fn groups(&self) -> Vec<Group> {
        let mut groups: Vec<Group> = Vec::new();
        for c in &self.converted {
            let mut one = Group::new(&pattern(&c.name), c.from, &c.to);
            let error = c.error();
            one.count = 1;
            (one.input_bytes, one.output_bytes, one.sums) = (c.input_bytes, c.output_bytes, c.sums);
            (one.worst_l2, one.worst_cosine) = (error.relative_l2, error.cosine);
            match groups.iter_mut().find(|g| (&g.name, g.from, &g.to) == (&one.name, one.from, &one.to)) {
                Some(group) => group.merge(&one),
                None => groups.push(one),
            }
        }
        groups
    }
}

impl Group {
    fn new(name: &str, from: &'static str, to: &str) -> Self {
        let (count, input_bytes, output_bytes) = (0, 0, 0);
        let (sums, worst_l2, worst_cosine) = (ErrorSums::default(), 0.0, 1.0);
        Self {
            name: name.to_owned(),
            from,
            to: to.to_owned(),
            count,
            input_bytes,
            output_bytes,
            sums,
            worst_l2,
            worst_cosine,
        }
    }

    fn merge(&mut self, other: &Self) {
        self.count += other.count;
        self.input_bytes += other.input_bytes;
        self.output_bytes += other.output_bytes;
        self.sums.merge(&other.sums);
        self.worst_l2 = self.worst_l2.max(other.worst_l2);
        self.worst_cosine = self.worst_cosine.min(other.worst_cosine);
    }

    fn cells(&self) -> [String; 11] {
        let error = self.sums.report();
        [
            self.name.clone(),
            grouped(self.count as u64),
            self.from.to_owned(),
            self.to.clone(),
            grouped(self.input_bytes),
            grouped(self.output_bytes),
            format!("{:.5}", error.relative_l2),
            format!("{:.5}", self.worst_l2),
            format!("{:.2e}", error.max_abs),
            format!("{:.6}", error.cosine),
            format!("{:.6}", self.worst_cosine),
        ]
    }
}
