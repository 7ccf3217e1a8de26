# The half of a site that is the same on every cloud, linked into each root site-* so that it cannot drift: the variables, the
# first boot of a machine, the output. A link, as for modules/contract, and not a module: then an operator's tfvars, the
# addresses in existing states and `terraform output` are those of the root itself, and no variable is declared twice.
#
# The root's main.tf gives `local.cloud`, `local.secret_id` (what a machine reads at boot), the secret and module `pool`.

variable "site" {
  description = "The site's name, where it is, and its machines: the pool contract of modules/contract, without the role."
  type = object({
    name          = string
    region        = string
    machine_types = list(string)
    gpu           = object({ type = string, count = number })
    min           = number
    max           = number
    spot          = optional(bool, true)
    disk_gb       = optional(number, 200)
  })
}

variable "image" {
  description = "Engine image, pinned by digest."
  type        = string
}

variable "gateways" {
  description = "The gateways to dial, each host:port: output `gateways` of root core."
  type        = list(string)
  validation {
    condition     = length(var.gateways) > 0 && alltrue([for gateway in var.gateways : can(regex("^[A-Za-z0-9.-]+:[0-9]{1,5}$", gateway))])
    error_message = "gateways: at least one, each host:port without a scheme."
  }
}

variable "model" {
  description = "The model to serve: a Hub id, or a folder of the image."
  type        = string
  validation {
    condition     = can(regex("^[^[:space:]]+$", var.model))
    error_message = "model: a Hub id or a folder, without spaces."
  }
}

variable "settings" {
  description = "Further settings of the engine, as environment: MICO_SITE_SLOTS, MICO_SITE_USD_PER_HOUR and the like. Nothing secret."
  type        = map(string)
  default     = {}
}

variable "token" {
  description = "The token that this site joins with. Never in plan or state."
  type        = string
  ephemeral   = true
  sensitive   = true
  validation {
    condition     = can(regex("^[!-+\\x2d-~]{16,}$", var.token))
    error_message = "token: one of the site_tokens of root core: 16 or more characters without a comma or a space."
  }
}

variable "secrets" {
  description = "Further secrets of the engine, as environment: HF_TOKEN for a model that needs a licence. Never in plan or state."
  type        = map(string)
  default     = {}
  ephemeral   = true
  sensitive   = true
  validation {
    condition     = alltrue([for name, value in var.secrets : can(regex("^[A-Z][A-Z0-9_]*$", name)) && !strcontains(value, "\n")])
    error_message = "secrets: names in capitals, digits and _, and values of one line, or they would not become environment."
  }
}

variable "token_version" {
  description = "Raise it when the token or another secret changes; that is what makes Terraform write them."
  type        = number
  default     = 1
}

locals {
  secret = jsonencode(merge(var.secrets, { MICO_SITE_TOKEN = var.token })) # ephemeral: only for write-only arguments
}

module "machine" {
  source  = "../../modules/cloud-init"
  cloud   = local.cloud
  secrets = [local.secret_id]
  container = {
    image = var.image
    args  = ["site"]
    gpu   = true
    settings = merge({
      MICO_SITE_POOL     = var.site.name # every machine joins as the pool and its own host name
      MICO_SITE_CLOUD    = local.cloud
      MICO_SITE_REGION   = var.site.region
      MICO_SITE_GATEWAYS = join(",", var.gateways)
      MICO_SITE_TLS      = "true"
      MICO_SITE_MODEL    = var.model
      MICO_SITE_DRAIN_S  = "22" # ends by itself before the container is killed
      HF_HOME            = "/var/lib/mico/models"
    }, var.settings)
  }
}

output "pool" {
  description = "The site's pool."
  value       = module.pool.pool
}
