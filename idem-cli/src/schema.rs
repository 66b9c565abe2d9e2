//! `idem schema`: the schema that a store needs in its server.

use std::process::ExitCode;

use clap::ValueEnum;
use serde_json::json;

use crate::report::{Output, STATUSES, Stop, confirm};
use crate::store::StoreArguments;

/// The schema that a store needs in its server.
#[derive(clap::Subcommand)]
pub(crate) enum Schema {
    Print(Print),
    Diff(Diff),
    Migrate(Migrate),
}

impl Schema {
    pub(crate) fn json(&self) -> bool {
        match self {
            Self::Print(it) => it.json,
            Self::Diff(it) => it.json,
            Self::Migrate(it) => it.json,
        }
    }
}

/// Prints the definition of the table, and the rights that a login needs. Connects to no server.
#[derive(clap::Args)]
#[command(after_help = STATUSES)]
pub(crate) struct Print {
    /// Kind of the store
    #[arg(value_name = "STORE")]
    kind: Kind,
    /// Schema of PostgreSQL
    #[arg(long, value_name = "NAME", default_value = "idem")]
    schema: String,
    /// Table of SQLite, MySQL or DynamoDB, bucket of NATS
    #[arg(long, value_name = "NAME")]
    table: Option<String>,
    /// Number of hash partitions of the table, in PostgreSQL (docs/operations.md: "At size")
    #[arg(long, value_name = "N")]
    partitions: Option<u16>,
    /// Login of PostgreSQL or MySQL that handlers use
    #[arg(long, value_name = "NAME", default_value = "app")]
    login: String,
    /// Prints one JSON object per line
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum Kind {
    #[cfg(feature = "postgres")]
    Postgres,
    #[cfg(feature = "mysql")]
    #[value(name = "mysql")]
    MySql,
    #[cfg(feature = "sqlite")]
    Sqlite,
    #[cfg(feature = "dynamodb")]
    Dynamodb,
    #[cfg(feature = "nats")]
    Nats,
}

/// Compares the table in the server with the table that this release needs. Exit status 1 if they differ, 4 if there is
/// no table.
#[derive(clap::Args)]
#[command(after_help = STATUSES)]
pub(crate) struct Diff {
    #[command(flatten)]
    store: StoreArguments,
    /// Expected number of hash partitions, in PostgreSQL (default: any number)
    #[arg(long, value_name = "N")]
    partitions: Option<u16>,
    /// Prints one JSON object per line
    #[arg(long)]
    json: bool,
}

/// Creates a missing table with its index, in SQLite the file, in PostgreSQL the schema. Alters nothing.
///
/// Then compares the table with the table that this release needs. Exit status 1 if they differ: an existing table is
/// not altered.
#[derive(clap::Args)]
#[command(after_help = STATUSES)]
pub(crate) struct Migrate {
    /// Does not ask for confirmation
    #[arg(long)]
    yes: bool,
    #[command(flatten)]
    store: StoreArguments,
    /// Creates a table with this number of hash partitions, in PostgreSQL (default: a plain table)
    #[arg(long, value_name = "N")]
    partitions: Option<u16>,
    /// Prints one JSON object per line
    #[arg(long)]
    json: bool,
}

pub(crate) async fn main(schema: &Schema) -> Result<ExitCode, Stop> {
    match schema {
        Schema::Print(it) => print(it),
        Schema::Diff(it) => diff(it).await,
        Schema::Migrate(it) => migrate(it).await,
    }
}

/// Refuses `--partitions` for a store that supports no partitions.
fn for_postgres(partitions: Option<u16>, is_postgres: bool) -> Result<(), Stop> {
    match partitions {
        Some(_) if !is_postgres => Err(Stop::Usage("only PostgreSQL has --partitions".to_owned())),
        Some(129..) => Err(Stop::Usage("a table has 128 partitions at most".to_owned())),
        _ => Ok(()),
    }
}

fn print(arguments: &Print) -> Result<ExitCode, Stop> {
    let output = Output { json: arguments.json };
    for_postgres(
        arguments.partitions,
        arguments.kind.to_possible_value().is_some_and(|it| it.matches("postgres", false)),
    )?;
    for (part, text) in definition(arguments) {
        output.line(&json!({ "part": part, "text": text }), &format!("{text}\n"))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn definition(arguments: &Print) -> Vec<(&'static str, String)> {
    match arguments.kind {
        #[cfg(feature = "postgres")]
        Kind::Postgres => {
            let quoted = |name: &str| format!("\"{}\"", name.replace('"', "\"\""));
            let (schema, login) = (quoted(&arguments.schema), quoted(&arguments.login));
            // The right to delete is granted separately, because handlers never need it.
            let grants = format!(
                "-- For handlers.\nGRANT USAGE ON SCHEMA {schema} TO {login};\n\
                 GRANT SELECT, INSERT, UPDATE ON {schema}.records TO {login};\n\
                 -- To purge, and for operators who forget records.\nGRANT DELETE ON {schema}.records TO {login};"
            );
            let options = idem_runtime::PostgresStore::options().schema(&arguments.schema);
            let table = options.partitions(arguments.partitions.unwrap_or(0)).schema_sql();
            vec![("table", table.trim_end().to_owned()), ("grants", grants)]
        }
        #[cfg(feature = "mysql")]
        Kind::MySql => {
            let table = arguments.table.as_deref().unwrap_or(crate::store::mysql::TABLE);
            // The right to delete is granted separately, because handlers never need it.
            let (login, quoted) = (arguments.login.replace('\'', "''"), format!("`{table}`"));
            let grants = format!(
                "-- For handlers.\nGRANT SELECT, INSERT, UPDATE ON {quoted} TO '{login}'@'%';\n\
                 -- To purge, and for operators who forget records.\nGRANT DELETE ON {quoted} TO '{login}'@'%';"
            );
            vec![("table", idem_runtime::MySqlStore::schema_sql(table).trim_end().to_owned()), ("grants", grants)]
        }
        #[cfg(feature = "sqlite")]
        Kind::Sqlite => {
            let table = arguments.table.as_deref().unwrap_or(crate::store::sqlite::TABLE);
            vec![("table", idem_runtime::SqliteStore::schema_sql(table))]
        }
        #[cfg(feature = "dynamodb")]
        Kind::Dynamodb => {
            let name = arguments.table.as_deref().unwrap_or("idempotency");
            let template = idem_runtime::DynamoStore::CLOUDFORMATION.trim_end();
            // Two statements, so that handlers get fewer rights than operators.
            let policy = json!({
                "Version": "2012-10-17",
                "Statement": [
                    {
                        "Sid": "Handlers",
                        "Effect": "Allow",
                        "Action": ["dynamodb:PutItem", "dynamodb:UpdateItem", "dynamodb:GetItem"],
                        "Resource": format!("arn:aws:dynamodb:*:*:table/{name}"),
                    },
                    {
                        "Sid": "Operators",
                        "Effect": "Allow",
                        "Action": [
                            "dynamodb:PutItem", "dynamodb:UpdateItem", "dynamodb:GetItem", "dynamodb:DeleteItem",
                            "dynamodb:DescribeTable", "dynamodb:DescribeTimeToLive",
                        ],
                        "Resource": format!("arn:aws:dynamodb:*:*:table/{name}"),
                    },
                ],
            });
            let template =
                template.replace("\"TableName\": \"idempotency\"", &format!("\"TableName\": {}", json!(name)));
            vec![("table", template), ("grants", format!("{policy:#}"))]
        }
        #[cfg(feature = "nats")]
        Kind::Nats => {
            let bucket = arguments.table.as_deref().unwrap_or(crate::store::nats::BUCKET);
            let settings = idem_runtime::NatsStore::options().bucket(bucket).stream_settings();
            let settings: serde_json::Value = serde_json::from_str(&settings).unwrap_or_default();
            // Operators also list records, through a consumer.
            let handlers = [
                format!("$KV.{bucket}.>"),
                format!("$JS.API.STREAM.INFO.KV_{bucket}"),
                format!("$JS.API.STREAM.MSG.GET.KV_{bucket}"),
                format!("$JS.API.DIRECT.GET.KV_{bucket}.>"),
            ];
            let consumers = format!("$JS.API.CONSUMER.*.KV_{bucket}.>");
            let next = format!("$JS.API.CONSUMER.MSG.NEXT.KV_{bucket}.>");
            let operators = [&handlers[..], &[consumers, next]].concat();
            let grants = json!({
                "handlers": { "publish": handlers, "subscribe": ["_INBOX.>", format!("$KV.{bucket}.>")] },
                "operators": { "publish": operators, "subscribe": ["_INBOX.>"] },
            });
            vec![("table", format!("{settings:#}")), ("grants", format!("{grants:#}"))]
        }
    }
}

async fn diff(arguments: &Diff) -> Result<ExitCode, Stop> {
    let place = arguments.store.place()?;
    for_postgres(arguments.partitions, place.kind() == "postgres")?;
    let differences = place.differences(arguments.partitions, arguments.store.timeout()).await?;
    let Some(differences) = differences else {
        return Err(Stop::Nothing("there is no table; `idem schema migrate` creates it".to_owned()));
    };
    let output = Output { json: arguments.json };
    for difference in &differences {
        output.line(&json!({ "difference": difference }), difference)?;
    }
    if differences.is_empty() {
        output.line(&json!({ "difference": null }), "the table is as this release needs it")?;
        return Ok(ExitCode::SUCCESS);
    }
    Ok(ExitCode::from(1))
}

async fn migrate(arguments: &Migrate) -> Result<ExitCode, Stop> {
    let place = arguments.store.place()?;
    let kind = place.kind();
    for_postgres(arguments.partitions, kind == "postgres")?;
    confirm(arguments.yes, "", &format!("Create what is missing in {kind}"))?;
    let timeout = arguments.store.timeout();
    place.create(arguments.partitions, timeout).await?;
    // Only a missing table is created, so an existing table may still lack a column or the index.
    let differences = place.differences(arguments.partitions, timeout).await?;
    let differences = differences.unwrap_or_else(|| vec!["the table is missing".to_owned()]);
    if !differences.is_empty() {
        return Err(Stop::Refused(format!(
            "{kind} has a table that this release can't use as it is, and `migrate` alters no table: {}; `idem schema \
             print {kind}` prints the definition",
            differences.join("; ")
        )));
    }
    let text = format!("{kind} has what this release needs");
    Output { json: arguments.json }.line(&json!({ "store": kind, "action": "migrate" }), &text)?;
    Ok(ExitCode::SUCCESS)
}
