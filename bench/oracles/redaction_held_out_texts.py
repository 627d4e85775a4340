"""What people paste into a chat assistant, with a «kind» where a labelled value goes and a «filler» where none is."""

MAILS = """
Hi, can you make this sound more polite?

"Your parcel «order» has been lying at the depot for nine days. Call me on «phone» or write to «email», otherwise \
I want my money back on «iban»."
---
Rewrite for my boss pls:
hey team, the client («email») complained again, reachable under «phone_national_US» until 6pm, her order is «order»
---
Summarise this thread in two bullet points.

From: «name» <«email»>
To: support <«email»>
Cc: «email»; «email»
Date: «date» «time»
Subject: Re: Re: refund for order «order»

I've been charged twice on card «card» (exp 09/27). Please refund the second one.
Tel «phone_national_GB»
---
translate to german: "Please transfer the deposit to «iban», reference «order», and send a receipt to «email»."
---
Guten Tag,
ich habe am «date» bei Ihnen bestellt (Bestellnummer «order»), aber nichts bekommen. Sie erreichen mich unter \
«phone_national_DE» oder «email». Bitte überweisen Sie den Betrag auf mein Konto «iban» zurück.
Mit freundlichen Grüßen
«name»
---
Kannst du daraus eine kurze Signatur machen?

«name»
Leiterin Einkauf
Tel.: «phone_national_DE»
Mobil: «phone»
E-Mail: «email»
---
formulier mir eine Mahnung an «email», Rechnung «order» vom «date», Betrag «price», zahlbar auf IBAN: «iban»
---
Schreib eine Antwort: der Kunde hat mit Karte «card» bezahlt und will eine Rückbuchung. Rückruf unter «phone».
---
Bonjour,
Je n'ai toujours pas reçu mon colis n° «order» commandé le «date». Vous pouvez me joindre au «phone_national_FR» ou \
par mail à «email». Merci de me rembourser sur le compte «iban».
Cordialement, «name»
---
corrige les fautes stp : "je vous ai deja donner mon numero c'est le «phone_national_FR», mon adresse «email» et la \
carte finit pas elle est «card»"
---
Peux-tu traduire en anglais ? « Contactez-nous au «phone» ou à l'adresse «email» avant le «date». »
---
Hola, necesito que me ayudes con este correo:
Buenos días, les escribo por el pedido «order». Mi teléfono es «phone_national_ES» y mi correo «email». El reembolso, \
por favor, a la cuenta «iban». Gracias, «name»
---
Resume esto: el cliente pagó con la tarjeta «card» el «date»; llamar al «phone» si hay problemas.
---
here's the list, make a markdown table out of it
«name», «email», «phone»
«name», «email», «phone»
«name», «email», «phone»
---
Sort by last name, keep the columns:

name;mail;tel;iban
«name»;«email»;«phone»;«iban»
«name»;«email»;«phone»;«iban»
---
my card got declined again :( its «card» cvv i wont tell you lol. is that even a valid visa? they said \
call «phone_national_US»
---
Is this phishing? "Dear customer, your account will be locked. Confirm on «phone» or reply to «email»."
---
pls make a vcard

«name»
cell «phone_national_US»
office «phone»
«email»
---
can u write a cover letter? my details: «name», «email», «phone_national_GB», applying for the barista job
---
BEGIN:VCARD
VERSION:3.0
FN:«name»
TEL;TYPE=CELL:«phone»
EMAIL;TYPE=WORK:«email»
END:VCARD

why does my phone not import this?
---
Which of these three IBANs is from Germany? «iban», «iban» and «iban»
---
Draft an apology for the double charge. Cards concerned:
- «card»
- «card»
- «card»
"""

SYSTEMS = """
why is nginx returning 502? log:

```
«ipv4» - - [«clf»] "GET /api/v2/orders?id=«order» HTTP/1.1" 502 157 "-" "Mozilla/5.0 Chrome/124.0.0.0"
«ipv4» - - [«clf»] "POST /login HTTP/2.0" 200 981 "-" "curl/8.5.0"
```
---
sshd keeps getting hammered, write a fail2ban rule

«syslog» gw sshd[«pid»]: Failed password for invalid user admin from «ipv4» port 50112 ssh2
«syslog» gw sshd[«pid»]: Accepted publickey for deploy from «ipv6» port 40022 ssh2: ED25519
---
$ ip addr show eth0
2: eth0: <BROADCAST,MULTICAST,UP,LOWER_UP> mtu 1500 qdisc fq_codel state UP
    inet «ipv4»/24 brd «ipv4» scope global eth0
    inet6 «ipv6»/64 scope global dynamic
which one do i give to my isp?
---
curl: (7) Failed to connect to «ipv4» port 8443 after 130 ms: Connection refused
what does this mean? from the other box http://«ipv4»:8443/health works, and http://[«ipv6»]:8443/ also
---
{"ts":"«iso»","level":"warn","client_ip":"«ipv4»","user":"«email»","msg":"rate limited","trace_id":"«uuid»"}
{"ts":"«iso»","level":"error","client_ip":"«ipv6»","user":"«email»","msg":"card declined","card":"«card»"}
write me a jq filter that counts per user
---
Wie trage ich das in /etc/hosts ein?
«ipv4»  db-01 db-01.intern
«ipv6»  db-01
---
dig says:
;; ANSWER SECTION:
shop.internal.    300  IN  A     «ipv4»
shop.internal.    300  IN  AAAA  «ipv6»
---
Where's the mistake in this docker-compose?

```yaml
services:
  api:
    image: registry.internal/api:1.14.2
    environment:
      DATABASE_URL: postgresql://«login»:«url_credentials»@db:5432/orders
      REDIS_URL: redis://:«url_credentials»@cache:6379/0
      POSTGRES_PASSWORD: «password»
    ports: ["8080:8080"]
```
---
git push fails:
remote: Invalid credentials
fatal: Authentication failed for 'https://«login»:«url_credentials»@git.internal.example/shop/api.git/'
---
sqlalchemy.exc.OperationalError: could not connect, url was mysql+pymysql://«login»:«url_credentials»@«ipv4»:3306/crm
any idea?
---
Warum bekomme ich "authentication failed"?

```js
const client = new MongoClient("mongodb+srv://«login»:«url_credentials»@cluster0.ab1cd.mongodb.net/?retryWrites=true");
```
---
celery broker: amqp://«login»:«url_credentials»@rabbit.internal:5672/prod
and the mailer smtp://«login»:«url_credentials»@smtp.internal:587 times out, «ipv4» is reachable
---
mon .env :

```
APP_ENV=prod
APP_DEBUG=false
DB_HOST=«ipv4»
DB_USERNAME=«login»
DB_PASSWORD=«password»
MAIL_FROM=«email»
MAIL_PASSWORD="«password»"
```
pourquoi symfony ne le lit pas ?
---
# application.properties
spring.datasource.url=jdbc:postgresql://«ipv4»:5432/crm
spring.datasource.username=«login»
spring.datasource.password=«password»
spring.mail.password=«password»
---
```yaml
smtp:
  host: mail.internal
  user: «email»
  password: "«password»"
ldap:
  bind_dn: cn=«login»,ou=svc,dc=corp
  bind_password: '«password»'
```
convert to toml
---
{"host": "«ipv4»", "port": 5432, "user": "«login»", "password": "«password»", "sslmode": "require"}
turn this into a connection string
---
[client]
user = «login»
password = «password»
host = «ipv4»

is that the right format for .my.cnf?
---
redis.conf:
bind «ipv4»
requirepass «password»
maxmemory 512mb
---
Server=«ipv4»;Database=Orders;User Id=«login»;Password=«password»;Encrypt=True
Is this a correct ADO.NET string?
---
wpa_supplicant: ssid="Buero-5G" psk="«password»" -- warum verbindet der Pi nicht?
---
<add key="SmtpUser" value="«login»" />
<server><id>nexus</id><username>«login»</username><password>«password»</password></server>
why does maven ignore the server entry
---
```python
conn = psycopg2.connect(host="«ipv4»", user="«login»", password="«password»", dbname="crm")
```
how do I pool this?
---
module.exports = { host: '«ipv4»', user: '«login»', password: '«password»', database: 'shop' }
---
resource "aws_db_instance" "main" {
  username = "«login»"
  password = "«password»"
}
terraform says password is invalid
---
$ export PGPASSWORD='«password_command»'
$ psql -h «ipv4» -U «login» crm
psql: error: FATAL:  no pg_hba.conf entry
---
$ mysql -u «login» -p«password_command» -h «ipv4» shop < dump.sql
ERROR 1045 (28000): Access denied
---
curl -u «login»:«password_command» https://nexus.internal/repository/maven-releases/ -T app.jar gives 401
---
sshpass -p '«password_command»' scp backup.tgz «login»@«ipv4»:/srv/
is there a safer way?
---
docker login -u «login» --password «password_command» registry.internal
---
CREATE USER «login»@'%' IDENTIFIED BY '«password_command»';
how do i limit it to one table
---
the wifi password is «password_prose» can you make a nice printable sign
---
Mein Passwort lautet «password_prose» – ist das sicher genug?
---
mon mot de passe est «password_prose», il est assez fort ?
---
mi contraseña es «password_prose», ¿es segura?
---
what format is this key? ssh says invalid format

«private_key»
---
Kannst du das in eine .pfx umwandeln?
```
$ cat tls.key
«private_key»
```
---
deploy_key: |
«private_key»
my CI says "error in libcrypto"
---
{"type": "service_account", "project_id": "shop-prod", "private_key": "«private_key/json»\\n", "client_email": \
"«email»"}
Où mettre ce fichier ?
"""

TOOL_ARGUMENTS = """
{"to": "«email»", "cc": ["«email»"], "subject": "Order «order»", "body": "Hello «name»,\\nwe refund «price» to «iban»."}
---
{"customer": {"name": "«name»", "phone": "«phone»", "email": "«email»"}, "order_id": «order»}
---
{"card_number": "«card»", "amount_cents": 4599, "currency": "EUR", "ip": "«ipv4»"}
---
{"command": "ssh -i key.pem «login»@«ipv4» 'systemctl restart api'", "timeout_s": 30}
---
{"url": "https://«login»:«url_credentials»@artifacts.internal/simple/", "method": "GET"}
---
{"command": "export DB_PASSWORD=«password» && ./migrate.sh"}
---
{"path": "/etc/app/key.pem", "content": "«private_key/json»\\n", "mode": "0600"}
---
{"headers": {"Authorization": "Bearer «jwt»", "X-Forwarded-For": "«ipv6»"}, "url": "https://api.internal/v1/orders"}
---
{"query": "SELECT * FROM customers WHERE email = '«email»' OR phone = '«phone»' LIMIT 5"}
---
{"number": "«phone»", "text": "Ihr Termin am «date» um «time» Uhr"}
"""

TOKEN_CARRIERS = """
.env:
LOG_LEVEL=info
«variable»=«token»
PORT=8080
why isn't it picked up?
---
$ export «variable»="«token»"
$ ./deploy.sh
Error: 403 Forbidden
---
i get 401 with this key: «token» , did i copy it wrong?
---
```python
client = Client(token="«token»", timeout=30)
```
what's wrong here
---
{"«variable»": "«token»", "region": "eu-central-1", "retries": 3}
---
2025-03-04T10:11:12Z ERROR http client: request failed status=403 header="Authorization: Bearer «token»" took=133ms
---
curl -s -H "Authorization: Bearer «token»" https://api.internal/v1/me | jq .
---
Ist der Schlüssel «token» schon abgelaufen? Läuft seit «date».
---
config.yaml
  auth:
    token: «token»
    verify: true
est-ce que l'indentation est correcte ?
---
¿Por qué falla? const api = new Api('«token»');
---
Here's my CI file:
env:
  «variable»: '«token»'
steps: [checkout, test]
---
{"command": "curl -H 'X-Api-Key: «token»' https://api.internal/v1/orders"}
---
| name | value |
|---|---|
| «variable» | `«token»` |
---
url: https://api.internal/v1/orders?limit=5&key=«token»&page=2
"""

NAMED_TOKEN_CARRIERS = """
.env:
LOG_LEVEL=info
«variable»=«token»
PORT=8080
---
$ export «variable»="«token»"
$ ./deploy.sh
Error: 403 Forbidden
---
{"«variable»": "«token»", "region": "eu-central-1", "retries": 3}
---
[default]
region = eu-west-1
«variable» = «token»
pourquoi la cli ne trouve pas mes identifiants ?
---
env:
  «variable»: «token»
---
const config = { «variable»: '«token»', region: 'eu-west-1' };
warum undefined?
"""


def split(texts: str) -> list[str]:
    """The texts between the lines of three dashes."""
    return [text.strip("\n") for text in texts.split("\n---\n")]
