//! Conversion of a matrix whose rows may end in different formats.

use std::ops::Range;

use ninfer_core::WeightFormat;

use super::{Recipe, RowPart, Site, Target};
use crate::{Error, PackedMatrix, Result, encode};

impl Recipe {
    /// Converts a matrix, in pieces where its rows get different treatment: the results, stacked, are the matrix.
    ///
    /// `parts` are the kinds of rows with their numbers, over and over until the rows are used up: `[(Query, D), (Gate, D)]`
    /// for a `q_proj` with heads of `D`, `[(QueryKey, 2·Kd), (Value, Vd)]` for an `in_proj_qkv`. Neighbours with the same
    /// treatment stay together, so most matrices come back in one piece. An empty list is all rows.
    ///
    /// # Errors
    /// Those of [`Target::apply_owned`]; [`Error::Length`] if the kinds have no rows.
    ///
    /// ```
    /// use ninfer_core::{WeightFormat, shape::Part};
    /// use ninfer_quant::{Recipe, RowPart, Site, TensorRole, encode};
    /// let m = encode(WeightFormat::Bf16, 8, 64, &[0.5; 512])?;
    /// let site = Site::new(TensorRole::GdnQkv, Part::Layer(0), 4, false);
    /// let parts = [(RowPart::QueryKey, 5), (RowPart::Value, 3)];
    /// let stack = Recipe::Groupwise.convert_stack(m, &site, &parts)?;
    /// let formats: Vec<_> = stack.iter().map(|m| (m.format().name(), m.rows())).collect();
    /// assert_eq!(formats, [("q4", 5), ("q5", 3)]);
    /// # Ok::<(), ninfer_quant::Error>(())
    /// ```
    pub fn convert_stack(&self, m: PackedMatrix, site: &Site, parts: &[(RowPart, usize)]) -> Result<Vec<PackedMatrix>> {
        let stored = m.format();
        let targets: Vec<(Target, usize)> =
            parts.iter().map(|&(rows, count)| (self.target(&site.with_rows(rows), stored), count)).collect();
        if targets.windows(2).all(|pair| pair[0].0 == pair[1].0) {
            let target = targets.into_iter().next().map_or_else(|| self.target(site, stored), |(target, _)| target);
            return Ok(vec![target.apply_owned(m)?]);
        }
        if targets.iter().all(|(_, count)| *count == 0) {
            return Err(Error::Length { what: "rows of the parts of a matrix", expected: m.rows(), got: 0 });
        }
        let mut runs: Vec<(Range<usize>, &Target)> = Vec::new();
        let (mut row, mut kinds) = (0, targets.iter().cycle());
        while let Some((target, count)) = kinds.next().filter(|_| row < m.rows()) {
            let end = row.saturating_add(*count).min(m.rows());
            match runs.last_mut() {
                Some((range, last)) if *last == target => range.end = end,
                _ if end > row => runs.push((row..end, target)),
                _ => {}
            }
            row = end;
        }
        runs.into_iter().map(|(range, target)| target.apply_owned(rows(&m, range)?)).collect()
    }
}

/// Some rows; where a block of scales would be cut, their values.
fn rows(m: &PackedMatrix, range: Range<usize>) -> Result<PackedMatrix> {
    match m.slice_rows(range.clone()) {
        Err(Error::Rows { .. }) => {
            let cols = m.cols();
            let mut values = vec![0.0; range.len() * cols];
            for (row, out) in range.clone().zip(values.chunks_exact_mut(cols.max(1))) {
                m.dequantize_row(row, out)?;
            }
            encode(WeightFormat::F32, range.len(), cols, &values)
        }
        cut => cut,
    }
}
