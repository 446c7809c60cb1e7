//! What a checkpoint holds, with the layers folded together.

use ninfer_core::WeightFormat;
use ninfer_core::shape::LayerKind;
use ninfer_models::weights::{Entry, EntryRole, LayerRef, VectorRole, WeightTable};
use serde::Serialize;

use crate::Result;
use crate::formats::stored_format;
use crate::recipes::Recipes;
use crate::table::{Align, Table, grouped};

/// Tensors of one name pattern, shape and format.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Group {
    /// The name with every number in it written `*`.
    pub name: String,
    /// What it is for.
    pub role: String,
    /// How many there are.
    pub count: usize,
    /// Shape of one.
    pub shape: Vec<usize>,
    /// How it is stored.
    pub stored: String,
    /// Stored bytes of all of them, scales included.
    pub bytes: u64,
    /// The format once loaded.
    pub loaded: String,
    /// Bytes of all of them once loaded.
    pub loaded_bytes: u64,
}

impl Group {
    fn new(table: &WeightTable, entry: &Entry, recipes: &Recipes) -> Self {
        let elements = entry.shape.iter().fold(1u64, |n, &d| n.saturating_mul(d as u64));
        let (format, one) = match (entry.role, entry.shape.as_slice()) {
            (EntryRole::Matrix(role), &[rows, cols]) => {
                let (stored, site) = (stored_format(entry), table.site(entry.layer, role));
                let kinds = table.row_parts(role);
                let formats: Vec<(WeightFormat, usize)> =
                    kinds.iter().map(|&(part, n)| (recipes.result(&site.with_rows(part), stored), n)).collect();
                match formats.first() {
                    Some((first, _)) if formats.iter().any(|(format, _)| format != first) => {
                        mixed(&formats, rows, cols)
                    }
                    Some(&(format, _)) => (format.to_string(), format.bytes(rows, cols) as u64),
                    None => {
                        let format = recipes.result(&site, stored);
                        (format.to_string(), format.bytes(rows, cols) as u64)
                    }
                }
            }
            _ => (WeightFormat::F32.to_string(), elements.saturating_mul(4)),
        };
        Self {
            name: pattern(&entry.name),
            role: entry.role.to_string(),
            count: entry.count,
            shape: entry.shape.clone(),
            stored: entry.stored.to_string(),
            bytes: entry.bytes,
            loaded: format,
            loaded_bytes: one.saturating_mul(entry.count as u64),
        }
    }

    fn parameters(&self) -> u64 {
        self.shape.iter().fold(self.count as u64, |n, &d| n.saturating_mul(d as u64))
    }

    fn takes(&self, other: &Self) -> bool {
        (&self.name, &self.role, &self.shape, &self.stored) == (&other.name, &other.role, &other.shape, &other.stored)
    }
}

/// All tensors of a checkpoint.
#[derive(Clone, Debug, Serialize)]
pub struct Inventory {
    /// In the order of the layers.
    pub groups: Vec<Group>,
    /// Elements of all tensors.
    pub parameters: u64,
    /// Stored bytes.
    pub bytes: u64,
    /// Bytes once loaded.
    pub loaded_bytes: u64,
}

impl Inventory {
    /// Lists an opened checkpoint, as it will be after the recipes.
    #[must_use]
    pub fn new(table: &WeightTable, recipes: &Recipes) -> Self {
        let mut groups: Vec<Group> = Vec::new();
        for entry in table.entries() {
            let one = Group::new(table, &entry, recipes);
            match groups.iter_mut().find(|group| group.takes(&one)) {
                Some(group) => {
                    group.count += one.count;
                    group.bytes = group.bytes.saturating_add(one.bytes);
                    group.loaded_bytes = group.loaded_bytes.saturating_add(one.loaded_bytes);
                }
                None => groups.push(one),
            }
        }
        let sum = |of: fn(&Group) -> u64| groups.iter().map(of).fold(0u64, u64::saturating_add);
        let (parameters, bytes, loaded_bytes) = (sum(Group::parameters), sum(|g| g.bytes), sum(|g| g.loaded_bytes));
        Self { groups, parameters, bytes, loaded_bytes }
    }

    /// A table with a line a group.
    #[must_use]
    pub fn table(&self) -> Table {
        let (left, right) = (Align::Left, Align::Right);
        let mut table = Table::new(&[
            ("tensor", left),
            ("role", left),
            ("count", right),
            ("shape", right),
            ("stored", left),
            ("bytes", right),
            ("loaded", left),
            ("bytes", right),
        ]);
        for g in &self.groups {
            let shape: Vec<String> = g.shape.iter().map(usize::to_string).collect();
            table.row([
                g.name.clone(),
                g.role.clone(),
                grouped(g.count as u64),
                shape.join(" × "),
                g.stored.clone(),
                grouped(g.bytes),
                g.loaded.clone(),
                grouped(g.loaded_bytes),
            ]);
        }
        table
    }
}

/// Name and bytes of a matrix whose kinds of rows, which follow each other over and over, have these formats.
fn mixed(formats: &[(WeightFormat, usize)], rows: usize, cols: usize) -> (String, u64) {
    let names: Vec<&str> = formats.iter().map(|(format, _)| format.name()).collect();
    let times = rows / formats.iter().map(|(_, n)| n).sum::<usize>().max(1);
    let bytes = formats.iter().map(|(format, n)| format.bytes(n.saturating_mul(times), cols) as u64).sum();
    (names.join(" + "), bytes)
}

/// A name with every component that is a number written `*`.
pub(crate) fn pattern(name: &str) -> String {
    let is_number = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
    name.split('.').map(|part| if is_number(part) { "*" } else { part }).collect::<Vec<_>>().join(".")
}

/// Heads of a Gated DeltaNet layer that never forget.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct KeepingHeads {
    /// Index of the layer.
    pub layer: usize,
    /// The heads with `A_log = −∞`.
    pub heads: Vec<usize>,
}

/// Looks for heads with `A_log = −∞`, reading nothing but the `A_log` vectors. They are legal: such a head has a decay of 0
/// and keeps its state for ever, which in a trained model often is a value that was rounded to zero.
///
/// # Errors
/// What reading the vectors reports.
pub fn keeping_heads(table: &WeightTable) -> Result<Vec<KeepingHeads>> {
    let mut found = Vec::new();
    for (layer, kind) in table.config().layers.iter().enumerate() {
        if *kind != LayerKind::LinearAttention {
            continue;
        }
        let values = table.vector(LayerRef::Main(layer), VectorRole::ALog)?;
        let heads: Vec<usize> =
            values.iter().enumerate().filter(|&(_, &x)| x == f32::NEG_INFINITY).map(|(i, _)| i).collect();
        if !heads.is_empty() {
            found.push(KeepingHeads { layer, heads });
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_in_names_become_stars() {
        assert_eq!(pattern("model.layers.12.mlp.experts.*.up_proj"), "model.layers.*.mlp.experts.*.up_proj");
        assert_eq!(pattern("lm_head.weight"), "lm_head.weight");
        assert_eq!(pattern("a..3b.7"), "a..3b.*");
    }
}
