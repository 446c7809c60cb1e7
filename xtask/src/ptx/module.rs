//! The text of a PTX module: made small, stamped, and read for its entries.

use super::target::Target;

/// Shortens a module that the compiler wrote and stamps it with the target's version: no comments, no empty lines, no
/// white space around lines.
pub fn shorten(ptx: &str, target: &Target) -> Result<String, String> {
    let mut out = String::with_capacity(ptx.len());
    let (mut versions, mut targets) = (0, 0);
    for line in uncommented(ptx).lines().map(str::trim).filter(|l| !l.is_empty()) {
        if line.starts_with(".version ") {
            versions += 1;
            out.push_str(&format!(".version {}", target.version_text()));
        } else if line.starts_with(".pragma \"used_bytes_mask") {
            // A hint that only newer versions know.
            continue;
        } else {
            targets += usize::from(line == format!(".target {}", target.name));
            // The compiler aligns operands by white space.
            match line.contains('"') {
                true => out.push_str(line),
                false => out.push_str(&line.split_whitespace().collect::<Vec<_>>().join(" ")),
            }
        }
        out.push('\n');
    }
    match (versions, targets) {
        (1, 1) => Ok(out),
        _ => Err(format!("the compiler wrote {versions} versions and {targets} targets {}", target.name)),
    }
}

/// The text without comments of both kinds; what stands in quotes is left alone.
fn uncommented(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find(['/', '"']) {
        let (before, here) = rest.split_at(at);
        out.push_str(before);
        let skipped = if here.starts_with("//") {
            here.find('\n').unwrap_or(here.len())
        } else if let Some(comment) = here.strip_prefix("/*") {
            comment.find("*/").map_or(here.len(), |end| end + 4)
        } else {
            let end = if here.starts_with('"') { quoted(here) } else { 1 };
            out.push_str(&here[..end]);
            end
        };
        rest = &here[skipped..];
    }
    out + rest
}

/// Length of the quoted text that a text begins with.
fn quoted(text: &str) -> usize {
    let mut escaped = false;
    for (i, c) in text.char_indices().skip(1) {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            '"' => return i + 1,
            _ => {}
        }
    }
    text.len()
}

/// A module for another target, to see that it is refused there.
pub fn retarget(ptx: &str, from: &str, to: &str) -> String {
    ptx.replacen(&format!(".target {from}\n"), &format!(".target {to}\n"), 1)
}

/// An entry and its parameters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    pub name: String,
    /// The type of each parameter: `u64` of a pointer, `b8[24]` of a structure of 24 bytes.
    pub parameters: Vec<String>,
}

/// The entries of a shortened module, in its order.
pub fn entries(ptx: &str) -> Result<Vec<Entry>, String> {
    let mut entries: Vec<Entry> = Vec::new();
    let mut open = false;
    for line in ptx.lines() {
        if let Some(rest) = line.strip_prefix(".visible .entry ") {
            let name = rest.trim_end_matches(['(', ')', ' ']).to_owned();
            entries.push(Entry { name, parameters: Vec::new() });
            open = rest.ends_with('(');
        } else if open {
            if let Some(parameter) = line.strip_prefix(".param ") {
                let entry = entries.last_mut().ok_or("a parameter without an entry")?;
                let parameter = parameter.trim_end_matches([',', ' ']);
                entry.parameters.push(kind(parameter).ok_or_else(|| format!("{}: .param {parameter}", entry.name))?);
            }
            open = !line.starts_with(')');
        }
    }
    Ok(entries)
}

/// The type of a declared parameter, such as `.align 8 .b8 name[24]`.
fn kind(parameter: &str) -> Option<String> {
    let mut words = parameter.split(' ').collect::<Vec<_>>();
    let name = words.pop()?;
    let kinds = ["u8", "u16", "u32", "u64", "s8", "s16", "s32", "s64", "f16", "f32", "f64", "b8", "b16", "b32", "b64"];
    let kind = words.iter().filter_map(|w| w.strip_prefix('.')).find(|w| kinds.contains(w))?;
    let size = name.split_once('[').map_or("", |(_, size)| size);
    Some(if size.is_empty() { kind.to_owned() } else { format!("{kind}[{size}") })
}

#[cfg(test)]
mod tests {
    use super::*;

    const WRITTEN: &str = "//\n// Generated\n//\n\n.version 8.8\n.target sm_90a\n.address_size 64\n\n\t// .globl\tf\n\
        .visible .entry f(\n\t.param .u64 .ptr .align 1 f_param_0,\n\t.param .align 8 .b8 f_param_1[24],\n\
        \t.param .f32 f_param_2\n)\n.maxntid 256, 1, 1\n{\n\t.reg .b32 \t%r<2>;\n\t/* a\n b */ and.b64  \t%rd10, %rd9, 252; // c\n\
        \tret;\n\n}\n.visible .entry g()\n{\n\tret;\n}\n";

    fn target(name: &str) -> &'static Target {
        Target::named(name).unwrap()
    }

    #[test]
    fn modules_are_shortened_and_stamped() {
        let short = shorten(WRITTEN, target("sm_90a")).unwrap();
        assert!(short.starts_with(".version 8.0\n.target sm_90a\n.address_size 64\n.visible .entry f(\n.param .u64"));
        assert!(short.contains("\nand.b64 %rd10, %rd9, 252;\nret;\n}\n"), "{short}");
        assert!(shorten(WRITTEN, target("sm_90")).is_err(), "another target than the compiler was asked for");
        assert!(retarget(&short, "sm_90a", "sm_90").contains(".target sm_90\n"));
    }

    #[test]
    fn entries_come_with_the_types_of_their_parameters() {
        let entries = entries(&shorten(WRITTEN, target("sm_90a")).unwrap()).unwrap();
        let parameters = ["u64", "b8[24]", "f32"].map(str::to_owned).into();
        assert_eq!(entries[0], Entry { name: "f".into(), parameters });
        assert_eq!(entries[1], Entry { name: "g".into(), parameters: vec![] });
        assert_eq!(entries.len(), 2);
        assert!(super::entries(".visible .entry f(\n.param .pred x\n)").unwrap_err().contains("f: .param .pred"));
    }

    #[test]
    fn quotes_keep_what_looks_like_a_comment() {
        assert_eq!(uncommented("a \"b // \\\" c\" / d // e\nf /* g */h"), "a \"b // \\\" c\" / d \nf h");
        for open in ["\"abc", "/* abc", "// abc", "/"] {
            assert!(uncommented(open).len() <= open.len());
        }
    }
}
