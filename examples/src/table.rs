//! Tables with aligned columns.

use std::fmt;

/// How a column is aligned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Align {
    /// Text.
    Left,
    /// Numbers.
    Right,
}

/// Rows of text under column heads.
#[derive(Clone, Debug)]
pub struct Table {
    columns: Vec<(String, Align)>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// An empty table.
    #[must_use]
    pub fn new(columns: &[(&str, Align)]) -> Self {
        let columns = columns.iter().map(|&(head, align)| (head.to_owned(), align)).collect();
        Self { columns, rows: Vec::new() }
    }

    /// Adds a row; cells that are not given are empty, cells without a column are dropped.
    pub fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        let mut cells: Vec<String> = cells.into_iter().collect();
        cells.resize(self.columns.len(), String::new());
        self.rows.push(cells);
    }
}

impl Table {
    /// The table in Markdown.
    #[must_use]
    pub fn markdown(&self) -> String {
        let line = |cells: &[String]| {
            let cells: Vec<String> = cells.iter().map(|cell| cell.replace('|', "\\|")).collect();
            format!("| {} |\n", cells.join(" | "))
        };
        let heads: Vec<String> = self.columns.iter().map(|(head, _)| head.clone()).collect();
        let rule = |align: &Align| if *align == Align::Right { "---:" } else { "---" };
        let rule: Vec<&str> = self.columns.iter().map(|(_, align)| rule(align)).collect();
        let mut out = line(&heads);
        out.push_str(&format!("|{}|\n", rule.join("|")));
        self.rows.iter().for_each(|row| out.push_str(&line(row)));
        out
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let heads: Vec<String> = self.columns.iter().map(|(head, _)| head.clone()).collect();
        let rule = Vec::new();
        let lines = || std::iter::once(&heads).chain(std::iter::once(&rule)).chain(&self.rows);
        let width = |i: usize| lines().filter_map(|l| l.get(i)).map(|c| c.chars().count()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..self.columns.len()).map(width).collect();
        for cells in lines() {
            let mut line = String::new();
            for (i, (&width, (_, align))) in widths.iter().zip(&self.columns).enumerate() {
                let cell = match cells.get(i) {
                    Some(cell) => cell.clone(),
                    None => "-".repeat(width),
                };
                line.push_str(&match align {
                    Align::Left => format!("{cell:<width$}  "),
                    Align::Right => format!("{cell:>width$}  "),
                });
            }
            writeln!(f, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

/// A count with thin groups of three digits, such as `14,450,736`.
#[must_use]
pub fn grouped(count: u64) -> String {
    let digits = count.to_string();
    let mut out = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned() {
        let mut table = Table::new(&[("name", Align::Left), ("n", Align::Right)]);
        table.row(["é".to_owned(), "1,000".to_owned()]);
        table.row(["longer".to_owned()]);
        assert_eq!(table.to_string(), "name        n\n------  -----\né       1,000\nlonger\n");
        assert_eq!(table.markdown(), "| name | n |\n|---|---:|\n| é | 1,000 |\n| longer |  |\n");
    }

    #[test]
    fn digits_are_grouped() {
        assert_eq!([0, 999, 1000, 14_450_736].map(grouped), ["0", "999", "1,000", "14,450,736"]);
    }
}
