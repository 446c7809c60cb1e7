//! Licenses of everything that is built, tested or measured with.

mod expression;

use serde_json::Value;

use crate::report::Report;
use crate::{cargo, tree};
use expression::Expression;

/// Licenses under which a dependency may be used: permissive ones that ask for no more than a notice.
const ALLOWED: [&str; 12] = [
    "MIT",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "ISC",
    "Zlib",
    "Unicode-3.0",
    "Unlicense",
    "CC0-1.0",
    "MIT-0",
    "BSL-1.0",
];

pub fn check(report: &mut Report) -> Result<(), String> {
    let root = tree::root();
    let metadata = match cargo::metadata(&root, &["--all-features"]) {
        Ok(metadata) => metadata,
        Err(error) => {
            // Crates of other systems may be out of reach; those of this one are there, or nothing would build.
            let host = host(&root)?;
            let metadata =
                cargo::metadata(&root, &["--all-features", "--filter-platform", &host]).map_err(|_| error)?;
            report.checked(format!("the crates of other systems than {host} could not be fetched and are left out"));
            metadata
        }
    };
    let (mut foreign, mut expressions) = (0, Vec::new());
    for package in cargo::array(&metadata["packages"]).iter().filter(|p| !p["source"].is_null()) {
        foreign += 1;
        let name = format!("{} {}", cargo::text(&package["name"]), cargo::text(&package["version"]));
        let license = cargo::text(&package["license"]);
        if let Err(why) = judge(&package["license"]) {
            report.fail(format!("{name}: {why}"));
        }
        expressions.push(license);
    }
    if foreign == 0 {
        return Err("cargo metadata lists no dependency".to_owned());
    }
    expressions.sort();
    expressions.dedup();
    report.checked(format!(
        "{foreign} dependencies with {} different expressions: {}",
        expressions.len(),
        expressions.join("; ")
    ));
    for member in cargo::members(&root)? {
        if member.manifest["license"] != "MIT OR Apache-2.0" {
            report.fail(format!("{}: its license is not MIT OR Apache-2.0", member.name));
        }
    }
    Ok(())
}

fn judge(license: &Value) -> Result<(), String> {
    let text = license.as_str().ok_or("no license expression")?;
    let expression: Expression = text.parse().map_err(|e| format!("{text}: {e}"))?;
    match expression.is_satisfied_by(&|license| ALLOWED.contains(&license)) {
        true => Ok(()),
        false => Err(format!("{text} cannot be satisfied by {}", ALLOWED.join(", "))),
    }
}

/// The target this toolchain builds for.
fn host(root: &std::path::Path) -> Result<String, String> {
    let text = cargo::stdout(root, &["--version", "--verbose"])?;
    let host = text.lines().find_map(|line| line.strip_prefix("host: "));
    host.map(str::to_owned).ok_or_else(|| "cargo does not name its host".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usual_expressions_pass() {
        for text in [
            "MIT",
            "MIT OR Apache-2.0",
            "MIT/Apache-2.0",
            "Apache-2.0 / MIT",
            "(MIT OR Apache-2.0) AND Unicode-3.0",
            "Apache-2.0 WITH LLVM-exception OR Apache-2.0 OR MIT",
            "MIT OR Apache-2.0 OR LGPL-2.1-or-later",
            "GPL-3.0-only OR (ISC AND Zlib)",
        ] {
            assert_eq!(judge(&text.into()), Ok(()), "{text}");
        }
    }

    #[test]
    fn others_do_not() {
        for text in [
            "GPL-3.0-only",
            "MPL-2.0",
            "MIT AND MPL-2.0",
            "(MIT OR Apache-2.0) AND OpenSSL",
            "Apache-2.0 WITH Classpath-exception-2.0",
            "LicenseRef-MIT",
            "mit",
            "MIT Apache-2.0",
        ] {
            assert!(judge(&text.into()).is_err(), "{text}");
        }
        assert!(judge(&Value::Null).is_err());
    }
}
