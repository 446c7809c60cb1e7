//! Recipes from TOML.

use ninfer_core::format::ActivationPrecision;
use ninfer_core::shape::Part;
use ninfer_core::{WeightFormat, shape};
use ninfer_quant::{Custom, Error, Recipe, RowPart, Site, TensorRole, convert, encode};
use proptest::prelude::*;

fn recipe(text: &str) -> Recipe {
    Custom::parse("test", text).unwrap().into()
}

/// What a matrix stored in BF16 becomes, in a model of ten layers with experts.
fn becomes(recipe: &Recipe, role: TensorRole, place: Part) -> &'static str {
    becomes_at(recipe, &Site::new(role, place, 10, true))
}

fn becomes_at(recipe: &Recipe, site: &Site) -> &'static str {
    recipe.target(site, WeightFormat::Bf16).result(WeightFormat::Bf16).name()
}

#[test]
fn the_first_rule_that_fits_decides() {
    let r = recipe(
        "base = 'q4'\n\
         [[rule]]\nrole = 'expert.*'\nlayers = [0, -1]\nformat = 'w8'\n\
         [[rule]]\nrole = ['expert.down', 'router']\nformat = 'q6'\n\
         [[rule]]\nname = ['lm_head', '*.self_attn.?_proj']\nformat = 'bf16'\n\
         [[rule]]\nrole = 'shared.*'\nmtp = true\nformat = 'q5'\n",
    );
    for (role, place, format) in [
        (TensorRole::ExpertDown, Part::Layer(0), "w8"),
        (TensorRole::ExpertDown, Part::Layer(9), "w8"),
        (TensorRole::ExpertDown, Part::Layer(5), "q6"),
        (TensorRole::ExpertUp, Part::Layer(5), "q4"),
        (TensorRole::Router, Part::Layer(5), "q6"),
        (TensorRole::Head, Part::Head, "bf16"),
        (TensorRole::AttnOut, Part::Layer(3), "bf16"),
        // Roles alone stay out of the MTP block, names do not, and the base does.
        (TensorRole::ExpertDown, Part::Mtp, "bf16"),
        (TensorRole::SharedUp, Part::Mtp, "q5"),
        (TensorRole::SharedUp, Part::Layer(2), "q4"),
        (TensorRole::SharedExpertGate, Part::Mtp, "q5"),
    ] {
        assert_eq!(becomes(&r, role, place), format, "{role} {place:?}");
    }
    assert_eq!(r.to_string(), "test");
}

#[test]
fn bases_come_before_defaults_and_both_may_be_left_out() {
    let r = recipe("base = 'q4'\ndefault = 'w8'");
    assert_eq!(becomes(&r, TensorRole::AttnV, Part::Layer(1)), "q4");
    for (role, place) in
        [(TensorRole::Router, Part::Layer(1)), (TensorRole::Embedding, Part::Embedding), (TensorRole::AttnV, Part::Mtp)]
    {
        assert_eq!(becomes(&r, role, place), "w8", "{role}");
    }
    let r = recipe("[[rule]]\nrole = 'mtp.fc'\nformat = 'q6'");
    assert_eq!(becomes(&r, TensorRole::MtpFc, Part::Mtp), "q6");
    assert_eq!(becomes(&r, TensorRole::AttnV, Part::Mtp), "bf16");
    // A rule that keeps is a decision, too.
    let r = recipe("base = 'q4'\ndefault = 'w8'\n[[rule]]\nrole = 'attn.v'\nformat = 'keep'");
    assert_eq!(becomes(&r, TensorRole::AttnV, Part::Layer(1)), "bf16");
    // Bases may be several recipes in a row.
    let r = recipe("base = 'nvfp4,bridge-fp8'");
    assert_eq!(becomes(&r, TensorRole::AttnV, Part::Layer(1)), "fp8");
}

#[test]
fn every_format_of_the_documentation_is_known() {
    let error = Custom::parse("test", "default = 'q3'").unwrap_err();
    let Error::RecipeValue { known, .. } = &error else { panic!("{error}") };
    let m = encode(WeightFormat::Bf16, 2, 64, &[0.25; 128]).unwrap();
    let site = Site::new(TensorRole::Head, Part::Head, 1, false);
    for name in known.split(", ") {
        let r = recipe(&format!("default = '{name}'"));
        let converted = convert(&m, &r, &site).unwrap();
        let plain = name.trim_end_matches("-a8").trim_end_matches("-a4");
        let expected = if plain == "keep" || plain.starts_with("bridge") { "bf16" } else { plain };
        assert_eq!(converted.format().name(), expected);
        let a8 = name.ends_with("-a8") && !plain.starts_with("bridge");
        assert_eq!(converted.activations() == ActivationPrecision::E4m3Token, a8, "{name}");
        let a4 = converted.activations() == ActivationPrecision::E2m1Group16;
        assert_eq!(a4, name == "nvfp4-a4", "{name}");
    }
    assert_eq!(known.split(", ").count(), 22);
    for name in ["keep-a8", "q4-a8", "bf16-a8", "nvfp4-a8", "fp8-a4", "bridge-fp8-a4", "fp8-a8-a8", "FP8", ""] {
        assert!(matches!(Custom::parse("test", &format!("default = '{name}'")), Err(Error::RecipeValue { .. })));
    }
    // A bridge in a rule converts what is NVFP4.
    let nvfp4 = encode(WeightFormat::Nvfp4, 2, 64, &[0.25; 128]).unwrap();
    let bridged = convert(&nvfp4, &recipe("default = 'bridge-fp8-block-a8'"), &site).unwrap();
    assert_eq!((bridged.format().name(), bridged.activations().name()), ("fp8-block", "a8"));
}

#[test]
fn rows_have_roles_of_their_own() {
    let r = recipe("[[rule]]\nrole = 'attn.q.gate'\nformat = 'w8'\n[[rule]]\nrole = 'attn.q'\nformat = 'q4'");
    let site = Site::new(TensorRole::AttnQ, Part::Layer(3), 4, false);
    assert_eq!(becomes_at(&r, &site.with_rows(RowPart::Gate)), "w8");
    assert_eq!(becomes_at(&r, &site.with_rows(RowPart::Query)), "q4");
    let m = encode(WeightFormat::Bf16, 12, 64, &[0.5; 12 * 64]).unwrap();
    let stack = r.convert_stack(m, &site, &[(RowPart::Query, 3), (RowPart::Gate, 3)]).unwrap();
    let formats: Vec<_> = stack.iter().map(|m| (m.rows(), m.format().name())).collect();
    assert_eq!(formats, [(3, "q4"), (3, "w8"), (3, "q4"), (3, "w8")]);
}

#[test]
fn plans_need_no_checkpoint() {
    let r = recipe("base = 'groupwise'\n[[rule]]\nname = 'model.layers.3?.*'\nformat = 'bf16'");
    let shape = shape::published("35b-a3b").unwrap();
    let format = r.formats(&shape, |_| WeightFormat::Bf16);
    for t in shape.tensors().filter(|t| t.role.is_matrix()) {
        if let Part::Layer(i) = t.part {
            let kept = matches!(t.role.name(), "router" | "shared scale" | "gdn a" | "gdn b");
            assert_eq!(format(&t) == WeightFormat::Bf16, i >= 30 || kept, "{i} {}", t.role);
        }
    }
}

#[track_caller]
fn refused(text: &str, at: usize, words: &[&str]) {
    let error = Custom::parse("mine.toml", text).unwrap_err();
    let (Error::RecipeSyntax { line, .. } | Error::RecipeValue { line, .. }) = error else { panic!("{error:?}") };
    let message = error.to_string();
    assert_eq!(line, at, "{message}");
    assert!(message.starts_with(&format!("recipe mine.toml, line {at}: ")), "{message}");
    for word in words {
        assert!(message.contains(word), "{message} lacks {word}");
    }
    assert!(!error.help().is_empty());
}

#[test]
fn errors_name_the_line_and_what_is_legal() {
    refused("base = 'q4'\n\nbase = 'q5'\n", 3, &["duplicate"]);
    refused("base = 'q4\n", 1, &[]);
    refused("\nbase = 'q3'", 2, &["base \"q3\"", "groupwise", "bridge-fp8-amax-a8"]);
    refused("base = 'mine.toml'", 1, &["base"]);
    refused("# a comment\ndefault = 'fp9'", 2, &["format \"fp9\"", "fp8-block-a8", "q6"]);
    refused("[[rule]]\nrole = 'attn.q'\nformat = 4", 3, &["string"]);
    refused("[[rule]]\nrole = 'attn.q'\n", 1, &["format"]);
    refused("base = 'q4'\n[[rule]]\nformat = 'q4'\n", 2, &["neither a role nor a name"]);
    refused("[[rule]]\nrole = []\nformat = 'q4'", 1, &["neither"]);
    refused(
        "[[rule]]\nrole = ['attn.q', 'atn.k']\nformat = 'q4'",
        2,
        &["role \"atn.k\"", "expert.down", "gdn.qkv.value"],
    );
    refused("[[rule]]\nrole = 7\nformat = 'q4'", 2, &["a string or a list of strings"]);
    refused("[[rule]]\nroles = 'attn.q'\nformat = 'q4'", 2, &["roles", "layers"]);
    refused("[[rule]]\nrole = 'attn.q'\nlayers = [1.5]\nformat = 'q4'", 3, &[]);
    refused("[[rule]]\nrole = 'attn.q'\nmtp = 'yes'\nformat = 'q4'", 3, &["bool"]);
    refused("", 1, &["no rule"]);
    refused("defualt = 'q4'", 1, &["defualt", "default"]);
}

#[test]
fn files_are_read_by_path_and_others_are_refused() {
    let dir = std::env::temp_dir().join(format!("recipes-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let path = dir.join("mine.toml");
    std::fs::write(&path, "base = 'q4'").unwrap();
    let path = path.to_str().unwrap();
    let r = Recipe::open(path).unwrap();
    assert_eq!(r.to_string(), path);
    let chain = Recipe::open(&format!("nvfp4,{path},bf16")).unwrap();
    assert_eq!(chain.to_string(), format!("nvfp4,{path},bf16"));
    std::fs::write(path, vec![b'#'; (1 << 20) + 1]).unwrap();
    for text in [path.to_owned(), format!("{path}/none.toml"), "/nowhere/none.toml".to_owned()] {
        let error = Recipe::open(&text).unwrap_err();
        assert!(matches!(&error, Error::RecipeFile { file, .. } if *file == text), "{error}");
    }
    std::fs::remove_file(path).unwrap();
    std::fs::create_dir(path).unwrap();
    assert!(matches!(Recipe::open(path), Err(Error::RecipeFile { .. })));
    std::fs::remove_dir_all(&dir).unwrap();
    assert!(matches!(Recipe::open("mine.tom"), Err(Error::UnknownRecipe { .. })));
}

proptest! {
    #[test]
    fn no_text_makes_the_reader_panic(text in "[a-z0-9=\\[\\]'\"\n .*-]{0,80}") {
        let _ = Custom::parse("any", &text);
    }

    #[test]
    fn no_rule_makes_the_reader_panic(role in ".{0,12}", format in ".{0,8}", layer in any::<i64>()) {
        let quoted = |s: &str| format!("\"{}\"", s.escape_default());
        let text = format!("[[rule]]\nrole = {}\nlayers = [{layer}]\nformat = {}", quoted(&role), quoted(&format));
        if let Ok(custom) = Custom::parse("any", &text) {
            let site = Site::new(TensorRole::AttnQ, Part::Layer(0), 1, false);
            let _ = Recipe::from(custom).target(&site, WeightFormat::Bf16);
        }
    }
}
