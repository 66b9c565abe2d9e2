//! `idem completions` and `idem man`.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Command;
use clap_complete::Shell;

use crate::report::{Stop, print};

/// Prints completions for a shell, for example `idem completions bash > /etc/bash_completion.d/idem`.
#[derive(clap::Args)]
pub(crate) struct Completions {
    /// The shell
    shell: Shell,
}

/// Prints the manual page, or writes one page for each command into a folder.
#[derive(clap::Args)]
pub(crate) struct Man {
    /// The folder for the pages: `idem.1`, `idem-show.1` and so on
    #[arg(long, value_name = "FOLDER")]
    dir: Option<PathBuf>,
}

pub(crate) fn completions(arguments: &Completions, mut command: Command) -> Result<ExitCode, Stop> {
    let mut script = Vec::new();
    clap_complete::generate(arguments.shell, &mut command, "idem", &mut script);
    print(&script)?;
    Ok(ExitCode::SUCCESS)
}

pub(crate) fn man(arguments: &Man, command: Command) -> Result<ExitCode, Stop> {
    match &arguments.dir {
        Some(folder) => {
            let written = std::fs::create_dir_all(folder).and_then(|()| clap_mangen::generate_to(command, folder));
            written.map_err(|error| Stop::Usage(format!("can't write to `{}`: {error}", folder.display())))?;
        }
        None => {
            let mut page = Vec::new();
            clap_mangen::Man::new(command).render(&mut page)?;
            print(&page)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}
