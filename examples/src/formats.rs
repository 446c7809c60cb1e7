//! The format that each matrix of a model will have, without loading it.

use std::collections::HashMap;

use ninfer_core::WeightFormat;
use ninfer_core::format::GroupFormat;
use ninfer_core::shape::{ModelShape, Part, TensorShape};
use ninfer_models::weights::{Entry, EntryRole, LayerRef, Stored, WeightTable};
use ninfer_quant::checkpoint::StoredKind;
use ninfer_quant::{Site, TensorRole};

use crate::recipes::Recipes;

/// Formats by place and role: as stored, then changed by recipes.
#[derive(Clone, Debug)]
pub struct Formats {
    stored: HashMap<(Part, TensorRole), WeightFormat>,
    /// For everything that is not in the map.
    elsewhere: WeightFormat,
    recipes: Recipes,
}

impl Formats {
    /// The formats of an opened checkpoint. Experts of one layer that are stored in different formats count as the first.
    #[must_use]
    pub fn of_checkpoint(table: &WeightTable, recipes: &Recipes) -> Self {
        let mut stored = HashMap::new();
        for entry in table.entries() {
            if let EntryRole::Matrix(role) = entry.role {
                stored.entry((part(entry.layer, role), role)).or_insert_with(|| stored_format(&entry));
            }
        }
        Self { stored, elsewhere: WeightFormat::Bf16, recipes: recipes.clone() }
    }

    /// A model whose matrices are all stored in BF16, as the family is published.
    #[must_use]
    pub fn of_release(recipes: &Recipes) -> Self {
        Self { stored: HashMap::new(), elsewhere: WeightFormat::Bf16, recipes: recipes.clone() }
    }

    /// The formats of a model's tensors after the recipes.
    pub fn of<'a>(&'a self, shape: &'a ModelShape) -> impl Fn(&TensorShape) -> WeightFormat + Copy + 'a {
        self.recipes.recipe().formats(shape, move |t| {
            let stored = Site::of(t, shape).and_then(|site| self.stored.get(&(t.part, site.role)));
            stored.copied().unwrap_or(self.elsewhere)
        })
    }
}

/// The format of a line of the weight table; for integers by another library, the format their usual files become.
#[must_use]
pub fn stored_format(entry: &Entry) -> WeightFormat {
    let kind = match entry.stored {
        Stored::Matrix(kind) => kind,
        Stored::Elements(dtype) => StoredKind::Plain(dtype),
        _ => return WeightFormat::Bf16,
    };
    kind.weight_format().unwrap_or_else(|| {
        let elements = entry.shape.iter().product::<usize>().saturating_mul(entry.count) as u64;
        let is_wide = entry.bytes > elements - elements / 4;
        WeightFormat::Group(if is_wide { GroupFormat::W8 } else { GroupFormat::Q4 })
    })
}

fn part(layer: LayerRef, role: TensorRole) -> Part {
    match layer {
        LayerRef::Main(i) => Part::Layer(i),
        LayerRef::Mtp => Part::Mtp,
        _ if role == TensorRole::Head => Part::Head,
        _ => Part::Embedding,
    }
}

#[cfg(test)]
mod tests {
    use ninfer_core::shape;

    use super::*;

    #[test]
    fn recipes_change_the_body_only() {
        let formats = Formats::of_release(&"q4".parse().unwrap());
        let shape = shape::published("35b-a3b").unwrap();
        let format = formats.of(&shape);
        let of = |role| format(&shape.tensors().find(|t| t.role == role).unwrap());
        assert_eq!(of(shape::Role::ExpertDown), WeightFormat::Group(GroupFormat::Q4));
        assert_eq!((of(shape::Role::Router), of(shape::Role::Embedding)), (WeightFormat::Bf16, WeightFormat::Bf16));
    }
}
