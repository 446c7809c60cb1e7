//! The published inventories: names, shapes and formats of every object, with the counts and sizes that their documents
//! state.

use ninfer_core::WeightFormat;
use ninfer_core::format::GroupFormat;
use ninfer_models::WeightTable;
use ninfer_models::weights::{LayerRef, MtpState};
use ninfer_quant::TensorRole;
use ninfer_quant::container::{ALIGNMENT, ContainerFormat};
use serde_json::json;

const BF16: ContainerFormat = ContainerFormat::Bf16;
const F32: ContainerFormat = ContainerFormat::F32;
const I32: ContainerFormat = ContainerFormat::I32;
const Q4: ContainerFormat = ContainerFormat::Group(GroupFormat::Q4);
const Q5: ContainerFormat = ContainerFormat::Group(GroupFormat::Q5);
const Q6: ContainerFormat = ContainerFormat::Group(GroupFormat::Q6);
const W8: ContainerFormat = ContainerFormat::Group(GroupFormat::W8);

type Object = (String, Vec<usize>, ContainerFormat);

fn under(stem: &str, list: &[(&str, &[usize], ContainerFormat)]) -> Vec<Object> {
    list.iter().map(|(name, shape, format)| (format!("{stem}{name}"), shape.to_vec(), *format)).collect()
}

fn vision(width: usize) -> Vec<Object> {
    let mut out = under(
        "vision/",
        &[
            ("patch_embedding", &[1152, 1536], Q6),
            ("patch_embedding_bias", &[1152], BF16),
            ("position_embedding", &[2304, 1152], BF16),
        ],
    );
    for b in 0..27 {
        out.extend(under(
            &format!("vision/layers/{b}/"),
            &[
                ("attention/qkv", &[3456, 1152], Q4),
                ("attention/qkv_bias", &[3456], BF16),
                ("attention/output", &[1152, 1152], Q5),
                ("attention/output_bias", &[1152], BF16),
                ("mlp/fc1", &[4304, 1152], Q4),
                ("mlp/fc1_bias", &[4304], BF16),
                ("mlp/fc2", &[1152, 4304], Q5),
                ("mlp/fc2_bias", &[1152], BF16),
                ("norm1/weight", &[1152], BF16),
                ("norm1/bias", &[1152], BF16),
                ("norm2/weight", &[1152], BF16),
                ("norm2/bias", &[1152], BF16),
            ],
        ));
    }
    out.extend(under(
        "vision/merger/",
        &[
            ("fc1", &[4608, 4608], W8),
            ("fc1_bias", &[4608], BF16),
            ("fc2", &[width, 4608], W8),
            ("fc2_bias", &[width], BF16),
            ("norm/weight", &[1152], BF16),
            ("norm/bias", &[1152], BF16),
        ],
    ));
    out
}

/// The 27B model in groupwise integers.
fn dense() -> Vec<Object> {
    const H: usize = 5120;
    let mlp: [(&str, &[usize], ContainerFormat); 3] =
        [("post_attention_norm", &[H], BF16), ("mlp/gate_up", &[34816, H], Q4), ("mlp/down", &[H, 17408], Q5)];
    let mut out = under("text/", &[("token_embedding", &[248_320, H], Q6)]);
    for i in 0..64 {
        let stem = format!("text/layers/{i}/");
        out.extend(under(&stem, &[("input_norm", &[H], BF16)]));
        let mixer: &[(&str, &[usize], ContainerFormat)] = if i % 4 == 3 {
            &[
                ("attention/query_key", &[7168, H], Q4),
                ("attention/gate_value", &[7168, H], Q5),
                ("attention/query_norm", &[256], BF16),
                ("attention/key_norm", &[256], BF16),
                ("attention/output", &[H, 6144], Q5),
            ]
        } else {
            &[
                ("gdn/a_log", &[48], F32),
                ("gdn/dt_bias", &[48], F32),
                ("gdn/convolution", &[4, 10240], BF16),
                ("gdn/a_projection", &[48, H], BF16),
                ("gdn/b_projection", &[48, H], BF16),
                ("gdn/query_key", &[4096, H], Q4),
                ("gdn/value_z", &[12288, H], Q5),
                ("gdn/norm", &[128], BF16),
                ("gdn/output", &[H, 6144], Q5),
            ]
        };
        out.extend(under(&stem, mixer));
        out.extend(under(&stem, &mlp));
    }
    out.extend(under(
        "text/",
        &[
            ("final_norm", &[H], BF16),
            ("output_head", &[248_320, H], Q6),
            ("draft_head", &[131_072, H], Q4),
            ("draft_head_token_ids", &[131_072], I32),
        ],
    ));
    out.extend(under(
        "mtp/",
        &[
            ("input_projection", &[H, 2 * H], W8),
            ("embedding_norm", &[H], BF16),
            ("hidden_norm", &[H], BF16),
            ("layer/input_norm", &[H], BF16),
            ("layer/attention/query_key_gate_value", &[14336, H], W8),
            ("layer/attention/query_norm", &[256], BF16),
            ("layer/attention/key_norm", &[256], BF16),
            ("layer/attention/output", &[H, 6144], W8),
            ("layer/post_attention_norm", &[H], BF16),
            ("layer/mlp/gate_up", &[34816, H], W8),
            ("layer/mlp/down", &[H, 17408], W8),
            ("final_norm", &[H], BF16),
        ],
    ));
    out.extend(vision(H));
    out
}

/// The 35B-A3B model in groupwise integers.
fn moe() -> Vec<Object> {
    const H: usize = 2048;
    let experts = |stem: &str, gate_up, down| {
        under(
            stem,
            &[
                ("post_attention_norm", &[H], BF16),
                ("moe/router_shared_gate", &[257, H], BF16),
                ("moe/routed_gate_up", &[262_144, H], gate_up),
                ("moe/routed_down", &[524_288, 512], down),
                ("moe/shared_gate_up", &[1024, H], W8),
                ("moe/shared_down", &[H, 512], W8),
            ],
        )
    };
    let attention: [(&str, &[usize], ContainerFormat); 5] = [
        ("input_norm", &[H], BF16),
        ("attention/query_key_gate_value", &[9216, H], W8),
        ("attention/query_norm", &[256], BF16),
        ("attention/key_norm", &[256], BF16),
        ("attention/output", &[H, 4096], W8),
    ];
    let gdn: [(&str, &[usize], ContainerFormat); 8] = [
        ("input_norm", &[H], BF16),
        ("gdn/a_log", &[32], F32),
        ("gdn/dt_bias", &[32], F32),
        ("gdn/convolution", &[4, 8192], BF16),
        ("gdn/a_b_projection", &[64, H], BF16),
        ("gdn/query_key_value_z", &[12288, H], W8),
        ("gdn/norm", &[128], BF16),
        ("gdn/output", &[H, 4096], W8),
    ];
    let mut out = under("text/", &[("token_embedding", &[248_320, H], W8)]);
    for i in 0..40 {
        let stem = format!("text/layers/{i}/");
        out.extend(under(&stem, if i % 4 == 3 { &attention } else { &gdn }));
        out.extend(experts(&stem, Q4, if [34, 38, 39].contains(&i) { Q6 } else { Q5 }));
    }
    out.extend(under(
        "text/",
        &[
            ("final_norm", &[H], BF16),
            ("output_head", &[248_320, H], Q6),
            ("draft_head", &[131_072, H], Q4),
            ("draft_head_token_ids", &[131_072], I32),
        ],
    ));
    out.extend(under(
        "mtp/",
        &[("input_projection", &[H, 2 * H], W8), ("embedding_norm", &[H], BF16), ("hidden_norm", &[H], BF16)],
    ));
    out.extend(under("mtp/layer/", &attention));
    out.extend(experts("mtp/layer/", W8, W8));
    out.extend(under("mtp/", &[("final_norm", &[H], BF16)]));
    out.extend(vision(H));
    out
}

fn bytes(objects: &[Object]) -> u64 {
    objects.iter().map(|(_, shape, format)| format.object_bytes(shape).unwrap()).sum()
}

fn count(objects: &[Object], format: ContainerFormat) -> usize {
    objects.iter().filter(|o| o.2 == format).count()
}

#[test]
fn counts_and_sizes_are_the_documented_ones() {
    let dense = dense();
    assert_eq!(dense.len(), 1118);
    let counts = [BF16, F32, I32, Q4, Q5, Q6, W8].map(|f| count(&dense, f));
    assert_eq!(counts, [582, 96, 1, 183, 246, 3, 7]);
    let moe = moe();
    assert_eq!(moe.len(), 883);
    let counts = [BF16, F32, I32, Q4, Q5, Q6, W8].map(|f| count(&moe, f));
    assert_eq!(counts, [461, 60, 1, 95, 91, 5, 170]);
    assert_eq!(bytes(&moe), 22_360_191_904);
    let of = |format| bytes(&moe.iter().filter(|o| o.2 == format).cloned().collect::<Vec<_>>());
    assert_eq!(
        [BF16, F32, I32, Q4, Q5, Q6, W8].map(of),
        [59_482_080, 7_680, 524_288, 11_679_339_456, 6_630_296_064, 1_027_840_000, 2_962_702_336]
    );
}

/// The directory of a container with these objects, in a file that has its length and no data.
#[cfg(unix)]
fn sparse(model_id: &str, objects: &[Object]) -> (tempfile::TempDir, std::path::PathBuf) {
    let mut end = 0u64;
    let list: Vec<_> = objects
        .iter()
        .map(|(name, shape, format)| {
            let (offset, bytes) = (end.next_multiple_of(ALIGNMENT), format.object_bytes(shape).unwrap());
            end = offset + bytes;
            json!({"name": name, "kind": "tensor", "shape": shape, "format": format.name(),
                   "layout": format.layout(), "offset": offset, "bytes": bytes})
        })
        .collect();
    let identity = json!({"model_id": model_id, "weights_id": "groupwise-int"});
    let directory = json!({"identity": identity, "objects": list}).to_string();
    let mut head = b"NINFER\0\x02".to_vec();
    head.extend_from_slice(&(directory.len() as u64).to_le_bytes());
    head.extend_from_slice(directory.as_bytes());
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.ninfer");
    std::fs::write(&path, &head).unwrap();
    let len = (head.len() as u64).next_multiple_of(4096) + end;
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(len).unwrap();
    (dir, path)
}

#[cfg(unix)]
#[test]
fn both_inventories_are_whole_models() {
    for (id, objects) in [("qwen3.6-27b", dense()), ("qwen3.8-27b", dense()), ("qwen3.6-35b-a3b", moe())] {
        let (_dir, path) = sparse(id, &objects);
        let table = WeightTable::open(&path).unwrap();
        assert_eq!((table.mtp(), table.shares_head()), (MtpState::Complete, false), "{id}");
        let skipped = |name: &str| name.starts_with("vision/") || name.starts_with("text/draft_head");
        let (mut stored, mut elements) = (0, 0);
        for (name, shape, format) in &objects {
            if !skipped(name) {
                elements += shape.iter().product::<usize>() as u64;
                // Padding between planes belongs to no row.
                stored += format.object_bytes(shape).unwrap();
            }
        }
        let entries = table.entries();
        let counted: u64 = entries.iter().map(|e| (e.count * e.shape.iter().product::<usize>()) as u64).sum();
        assert_eq!((counted, table.shape().parameters().total()), (elements, elements), "{id}");
        assert!(table.total_bytes() <= stored && table.total_bytes() + 256 * 1000 > stored, "{id}");
        // One matrix of zeros is read, though the file has none of its data.
        let m = table.matrix(LayerRef::Main(3), TensorRole::AttnV, &ninfer_models::Recipe::Keep).unwrap();
        let format = if id.ends_with("27b") { GroupFormat::Q5 } else { GroupFormat::W8 };
        assert_eq!(m.format(), WeightFormat::Group(format));
        // Anything left out is noticed.
        let (_dir, path) = sparse(id, &objects[1..]);
        assert!(WeightTable::open(&path).unwrap_err().to_string().contains("text/token_embedding"));
    }
}
