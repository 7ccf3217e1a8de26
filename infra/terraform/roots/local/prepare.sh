# Make FOLDER with the newest schema in DATABASE, a token for the sites and an administrator's API key; keep what is there already.
umask 077
mkdir -p "$FOLDER"
cd "$FOLDER"
[ -s site-token ] || python3 -c 'import secrets; print(secrets.token_urlsafe(32))' > site-token
$MICO --folder "$FOLDER" --quiet db upgrade --database "$DATABASE"
[ -s key ] || $MICO --folder "$FOLDER" --quiet keys create local --admin --database "$DATABASE" > key
