//! What recipes make of a checkpoint's matrices.

use ninfer_core::format::ActivationPrecision;
use ninfer_models::WeightTable;
use ninfer_models::weights::{ExpertPart, LayerRef};
use ninfer_quant::{Custom, Recipe, TensorRole, convert};

use crate::store::fixture;

/// Formats and rows of the pieces of a matrix.
fn pieces(table: &WeightTable, layer: LayerRef, role: TensorRole, recipe: &Recipe) -> Vec<(&'static str, usize)> {
    table.stack(layer, role, recipe).unwrap().iter().map(|m| (m.format().name(), m.rows())).collect()
}

#[test]
fn groupwise_cuts_one_matrix_of_a_dense_model() {
    let table = WeightTable::open(fixture("tiny-dense")).unwrap();
    let (first, recipe) = (LayerRef::Main(0), Recipe::Groupwise);
    let (gdn, attention) = (table.config().gdn, table.config().attention);
    let format = |layer, role| pieces(&table, layer, role, &recipe)[0].0;
    let cut = pieces(&table, first, TensorRole::GdnQkv, &recipe);
    assert_eq!(cut, [("q4", 2 * gdn.keys()), ("q5", gdn.values())]);
    let stack = table.stack(first, TensorRole::GdnQkv, &recipe).unwrap();
    let whole = table.matrix(first, TensorRole::GdnQkv, &Recipe::Keep).unwrap();
    let site = table.site(first, TensorRole::GdnQkv).with_rows(ninfer_quant::RowPart::QueryKey);
    assert_eq!(stack[0], convert(&whole.slice_rows(0..2 * gdn.keys()).unwrap(), &recipe, &site).unwrap());
    // Asked for in one piece, it has the wider format.
    assert_eq!(table.matrix(first, TensorRole::GdnQkv, &recipe).unwrap().format().name(), "q5");
    assert_eq!((format(first, TensorRole::GdnA), format(first, TensorRole::MlpUp)), ("bf16", "q4"));
    assert_eq!(format(LayerRef::Mtp, TensorRole::MtpFc), "w8");
    let full = (0..table.layers()).map(LayerRef::Main).find(|&l| table.stack(l, TensorRole::AttnQ, &recipe).is_ok());
    let full = full.unwrap();
    let rows = 2 * attention.heads * attention.head_dim;
    assert_eq!(pieces(&table, full, TensorRole::AttnQ, &recipe), [("q5", rows)]);
    let text = "[[rule]]\nrole = 'attn.q.query'\nformat = 'q4'\n[[rule]]\nrole = 'attn.q.gate'\nformat = 'fp8-a8'";
    let by_rows = Recipe::from(Custom::parse("rows", text).unwrap());
    let expected = [("q4", attention.head_dim), ("fp8", attention.head_dim)].repeat(attention.heads);
    assert_eq!(pieces(&table, full, TensorRole::AttnQ, &by_rows), expected);
}

#[test]
fn groupwise_knows_experts_and_their_layers() {
    let table = WeightTable::open(fixture("tiny-moe")).unwrap();
    let format = |layer, part| table.experts(layer, part, &Recipe::Groupwise).unwrap()[0].format().name();
    let layers = table.layers();
    for i in 0..layers {
        assert_eq!(format(LayerRef::Main(i), ExpertPart::GateUp), "q4");
        let wide = [1, 2, 6].contains(&(layers - i));
        assert_eq!(
            format(LayerRef::Main(i), ExpertPart::Down),
            if wide { "q6" } else { "q5" },
            "layer {i} of {layers}"
        );
    }
    assert_eq!(format(LayerRef::Mtp, ExpertPart::Down), "w8");
    assert_eq!(pieces(&table, LayerRef::Main(0), TensorRole::GdnQkv, &Recipe::Groupwise)[0].0, "w8");
    assert_eq!(pieces(&table, LayerRef::Main(0), TensorRole::Router, &Recipe::Groupwise)[0].0, "bf16");
}

#[test]
fn a8_recipes_set_the_activations_of_the_body() {
    let table = WeightTable::open(fixture("tiny-moe")).unwrap();
    let recipe = Recipe::Fp8BlockA8;
    for m in table.experts(LayerRef::Main(0), ExpertPart::Down, &recipe).unwrap() {
        assert_eq!((m.format().name(), m.activations()), ("fp8-block", ActivationPrecision::E4m3Token));
    }
    for (layer, role) in [(LayerRef::Mtp, TensorRole::SharedUp), (LayerRef::Main(0), TensorRole::Router)] {
        assert_eq!(table.matrix(layer, role, &recipe).unwrap().activations(), ActivationPrecision::Native);
    }
}
