# The whole federation as processes of this machine: the pool contract, the same product, no cloud. After a process has died, run
# `python3 ../../modules/process/process.py refresh DIR` before the next plan, and just that one is replaced.

terraform { required_version = ">= 1.11" }

variable "folder" {
  description = "Where database, keys, logs and records are kept; removed by destroy."
  type        = string
  default     = ".run"
}

variable "source_folder" {
  description = "Checkout of the product, unless it is installed; the one that this root is part of by default."
  type        = string
  default     = ""
}

variable "mico" {
  description = "How the product is started."
  type        = list(string)
  default     = ["python3", "-m", "mico"]
}

variable "gateways" {
  description = "The gateway replicas by name: the region each stands for, the port of the API and the port that the sites dial."
  type        = map(object({ region = string, http_port = number, grpc_port = number }))
  default     = { gateway = { region = "local", http_port = 18080, grpc_port = 18081 } }
}

variable "model" {
  description = "Folder or Hub id of the model; the one that ships with the product by default."
  type        = string
  default     = ""
}

variable "sites" {
  description = "The sites by name: the region each stands for, its slots, the least seconds of one iteration, its price."
  type = map(object({
    region              = string
    engines             = optional(number, 1)
    slots               = optional(number, 4)
    iteration_floor_s   = optional(number, 0.02)
    output_usd_per_mtok = optional(number, 1)
  }))
  default = {
    aws-eu   = { region = "eu-central-1", output_usd_per_mtok = 1.2 }
    azure-ap = { region = "southeastasia", output_usd_per_mtok = 1.0 }
    gcp-us   = { region = "us-central1", output_usd_per_mtok = 0.8 }
  }
}

locals {
  source   = abspath(coalesce(var.source_folder, "${path.module}/../../../.."))
  folder   = abspath(var.folder)
  database = "sqlite:///${local.folder}/mico.db"
  urls     = { for name, gateway in var.gateways : name => "http://127.0.0.1:${gateway.http_port}" }
  told     = { for name, gateway in var.gateways : name => "http://127.0.0.1:${gateway.http_port + 1000}" } # what operators are told
  dialled  = [for name, gateway in var.gateways : "127.0.0.1:${gateway.grpc_port}"]
  python   = { PYTHONPATH = local.source, OMP_NUM_THREADS = "1" }
}

# The schema, the token that sites join with and the first API key: made here, known to no state.
resource "terraform_data" "store" {
  triggers_replace = { folder = local.folder }

  provisioner "local-exec" {
    command     = file("${path.module}/prepare.sh")
    interpreter = ["/bin/sh", "-euc"]
    environment = merge(local.python, { FOLDER = local.folder, DATABASE = local.database, MICO = join(" ", var.mico) })
  }

  provisioner "local-exec" {
    when    = destroy
    command = "rm -rf '${self.triggers_replace.folder}'"
  }
}

# Each replica keeps its own journal; they share the key pepper, or a key made by one would be unknown to the other.
resource "terraform_data" "pepper" {
  for_each         = var.gateways
  triggers_replace = { folder = "${local.folder}/gateways/${each.key}", pepper = "${local.folder}/key-pepper" }

  provisioner "local-exec" {
    command = "umask 077 && mkdir -p '${self.triggers_replace.folder}' && cp '${self.triggers_replace.pepper}' '${self.triggers_replace.folder}/'"
  }

  depends_on = [terraform_data.store]
}

module "gateway" {
  source   = "../../modules/pool-local"
  for_each = var.gateways
  pool     = { name = each.key, role = "gateway", region = each.value.region, machine_types = ["process"], min = 1, max = 1 }
  ports    = { api = each.value.http_port, sites = each.value.grpc_port }
  local = {
    folder  = "${local.folder}/processes"
    command = concat(var.mico, ["gateway"])
    ready   = { url = "${local.urls[each.key]}/health" }
    environment = merge(local.python, {
      MICO_GATEWAY_NAME            = each.key
      MICO_GATEWAY_HTTP_PORT       = tostring(each.value.http_port)
      MICO_GATEWAY_GRPC_PORT       = tostring(each.value.grpc_port)
      MICO_GATEWAY_DATABASE_URL    = local.database
      MICO_GATEWAY_FOLDER          = terraform_data.pepper[each.key].triggers_replace.folder
      MICO_GATEWAY_SITE_TOKEN_FILE = "${local.folder}/site-token"
      MICO_GATEWAY_DRAIN_S         = "5"
    })
  }
  user_data = ""
}

module "site" {
  source   = "../../modules/pool-local"
  for_each = var.sites
  pool     = { name = each.key, role = "engine", region = each.value.region, machine_types = ["process"], min = each.value.engines, max = max(1, each.value.engines) }
  local = {
    folder  = "${local.folder}/processes"
    command = concat(var.mico, ["site"])
    ready   = { url = "${values(local.told)[0]}/ready", contains = "{name}" } # a gateway names the sites that can serve
    environment = merge(local.python, {
      MICO_SITE_SITE                = "{name}"
      MICO_SITE_CLOUD               = split("-", each.key)[0]
      MICO_SITE_REGION              = each.value.region
      MICO_SITE_GATEWAYS            = join(",", local.dialled)
      MICO_SITE_TOKEN_FILE          = "${local.folder}/site-token"
      MICO_SITE_MODEL               = var.model == "" ? "${local.source}/mico/demo_model/weights" : var.model
      MICO_SITE_SERVED_MODEL        = var.model == "" ? "mico-demo" : ""
      MICO_SITE_SLOTS               = tostring(each.value.slots)
      MICO_SITE_KV_TOKENS           = tostring(each.value.slots * 512)
      MICO_SITE_THREADS             = "1"
      MICO_SITE_ITERATION_FLOOR_S   = tostring(each.value.iteration_floor_s)
      MICO_SITE_OUTPUT_USD_PER_MTOK = tostring(each.value.output_usd_per_mtok)
      MICO_SITE_DRAIN_S             = "5"
    })
  }
  user_data  = ""
  depends_on = [module.gateway]
}

output "urls" {
  description = "Base URL for clients of each gateway; the API key is in FOLDER/key."
  value       = { for name, url in local.urls : name => "${url}/v1" }
}

output "pools" {
  description = "Each gateway's pool and each site's."
  value       = { gateways = { for name, gateway in module.gateway : name => gateway.pool }, sites = { for name, site in module.site : name => site.pool } }
}
