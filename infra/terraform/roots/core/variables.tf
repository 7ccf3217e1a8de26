variable "zone_name" {
  description = "DNS zone to make, such as mico.example.com; the API is api. below it."
  type        = string
  validation {
    condition     = can(regex("^([a-z0-9]([a-z0-9-]*[a-z0-9])?\\.)+[a-z][a-z0-9-]*[a-z0-9]$", var.zone_name))
    error_message = "zone_name: a DNS name in lower case, without a scheme and without a dot at its end."
  }
}

variable "images" {
  description = "Gateway image of each region, pinned by digest; two, so that a new version can be rolled out one region at a time."
  type        = object({ a = string, b = string })
}

variable "serving" {
  description = "Regions that clients are sent to. Take one out, wait until its streams have ended, change it, put it back."
  type        = set(string)
  default     = ["a", "b"]
  validation {
    condition     = length(var.serving) > 0 && length(setsubtract(var.serving, ["a", "b"])) == 0
    error_message = "serving: a, b or both."
  }
}

variable "regions" {
  description = "Region of the first gateways and of the database (a), and of the second ones and of the replica (b)."
  type        = object({ a = string, b = string })
  default     = { a = "eu-central-1", b = "us-east-1" }
  validation {
    condition     = var.regions.a != var.regions.b
    error_message = "regions: two different ones, or the loss of one takes everything."
  }
}

variable "machine_types" {
  description = "Machines a gateway may run on, in order of preference."
  type        = list(string)
  default     = ["m7i.xlarge", "m6i.xlarge"]
}

variable "settings" {
  description = "Further settings of the gateways, as environment: MICO_GATEWAY_POLICY and the like. Nothing secret."
  type        = map(string)
  default     = {}
}

variable "site_tokens" {
  description = "Tokens that let sites in, one for each site. Never in plan or state."
  type        = list(string)
  ephemeral   = true
  sensitive   = true
  validation {
    condition     = length(var.site_tokens) > 0 && alltrue([for token in var.site_tokens : can(regex("^[!-+\\x2d-~]{16,}$", token))])
    error_message = "site_tokens: at least one, each of 16 or more characters without a comma or a space; openssl rand -hex 32 makes one."
  }
}

variable "key_pepper" {
  description = "What API keys are hashed with: openssl rand -hex 32, once and for ever. Never in plan or state."
  type        = string
  ephemeral   = true
  sensitive   = true
  validation {
    condition     = length(var.key_pepper) >= 32
    error_message = "key_pepper: at least 32 characters, as the gateways ask for; openssl rand -hex 32 makes one."
  }
}

variable "certificate" {
  description = "Certificate chain and key, PEM, for api., a.gateway. and b.gateway. of the zone. Never in plan or state."
  type        = string
  ephemeral   = true
  sensitive   = true
}

variable "database_password" {
  description = "Password of the database's owner. Never in plan or state."
  type        = string
  ephemeral   = true
  sensitive   = true
  validation {
    condition     = length(var.database_password) >= 24
    error_message = "database_password: at least 24 characters."
  }
  validation {
    condition     = can(regex("^[!#-.0-?A-~]{0,128}$", var.database_password))
    error_message = "database_password: RDS takes at most 128 characters of ASCII, and no space, quotation mark, slash or @."
  }
}

variable "secrets_version" {
  description = "Raise it when one of the secrets changes; that is what makes Terraform write them."
  type        = number
  default     = 1
}

variable "database_class" {
  description = "Machine type of the database and of its replica."
  type        = string
  default     = "db.m7g.large"
}

variable "active_database" {
  description = "Which server the gateways use: primary, or standby after it has been promoted."
  type        = string
  default     = "primary"
  validation {
    condition     = contains(["primary", "standby"], var.active_database)
    error_message = "active_database: primary or standby."
  }
}

variable "protect" {
  description = "Refuse to delete the database."
  type        = bool
  default     = true
}
