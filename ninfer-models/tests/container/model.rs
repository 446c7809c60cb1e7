//! A model loaded from a container is the model loaded from a folder.

use std::path::Path;

use ninfer_core::format::GroupFormat;
use ninfer_core::model::{CausalModel, LaneOptions, PrefillEnd};
use ninfer_kernels::cpu::Cpu;
use ninfer_models::{Qwen35, Recipe, SessionOptions};
use ninfer_quant::container::ContainerFormat;

use crate::file::{Fusion, convert, fixture};

const BF16: ContainerFormat = ContainerFormat::Bf16;

/// Bits of the logits of a prompt, and what is drafted behind it.
fn run(path: &Path, recipe: &Recipe) -> (Vec<u32>, Vec<u32>) {
    let model = Qwen35::load(&Cpu::new(), path, recipe, &mut |_| {}).unwrap();
    let mut session = model.session(&SessionOptions::new(64)).unwrap();
    let prompt: Vec<u32> = (0..37).map(|i| (i * 37 + i * i * 11 + 5) % 479).collect();
    let mut bits = Vec::new();
    let mut sink = |_: usize, rows: &[f32]| {
        bits.extend(rows.iter().map(|x| x.to_bits()));
        Ok(())
    };
    let mut lane = session.open_lane(&LaneOptions::new(48)).unwrap();
    let end = PrefillEnd::Choose { drafts: 3 };
    let outcome = session.prefill(&mut lane, &prompt, end, Some(&mut sink)).unwrap().unwrap();
    (bits, [&outcome.tokens[..], &outcome.drafts[..]].concat())
}

#[test]
fn plain_weights_give_the_same_logits_bit_for_bit() {
    for (folder, fusion) in [
        ("tiny-dense", Fusion::Pairs),
        ("tiny-dense", Fusion::Whole),
        ("tiny-moe", Fusion::Whole),
        ("tiny-tied", Fusion::Pairs),
    ] {
        let expected = run(&fixture(folder), &Recipe::Keep);
        assert_eq!(expected.1.len(), 4);
        let objects = convert(folder, fusion, &|_| BF16);
        for version in [1, 2] {
            let (_dir, path) = objects.write(version, folder);
            assert!(run(&path, &Recipe::Keep) == expected, "{folder}, version {version}");
        }
    }
}

#[test]
fn packed_weights_run_as_those_of_a_recipe() {
    // What the recipe `w8` converts at load, the container has already: groups lie within rows, so fusing rows changes
    // nothing.
    let body = |name: &str| {
        let large = name.starts_with("text/layers/")
            && !name.ends_with("a_b_projection")
            && !name.ends_with("_projection")
            && !name.ends_with("router_shared_gate");
        if large { ContainerFormat::Group(GroupFormat::W8) } else { BF16 }
    };
    for (folder, fusion) in [("tiny-moe", Fusion::Whole), ("tiny-dense", Fusion::Pairs)] {
        let (_dir, path) = convert(folder, fusion, &body).write(2, folder);
        let expected = run(&fixture(folder), &"w8".parse().unwrap());
        assert!(run(&path, &Recipe::Keep) == expected, "{folder}");
        // Without MTP objects there is no MTP block.
        assert!(run(&path, &Recipe::Keep).0 != run(&fixture(folder), &Recipe::Keep).0, "{folder}");
    }
}

#[test]
fn a_recipe_applies_to_a_container_as_to_a_folder() {
    let (_dir, path) = convert("tiny-moe", Fusion::Whole, &|_| BF16).write(2, "tiny-moe");
    for recipe in ["q4", "fp8-block"] {
        let recipe = recipe.parse().unwrap();
        assert!(run(&path, &recipe) == run(&fixture("tiny-moe"), &recipe));
    }
}
