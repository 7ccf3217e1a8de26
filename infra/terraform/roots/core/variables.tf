variable "zone_name" {
  description = "DNS zone to make, such as mico.example.com; the API is api. below it."
  type        = string
}

variable "image" {
  description = "Gateway image, pinned by digest."
  type        = string
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

variable "gateways" {
  description = "Machines of each region's gateways."
  type        = object({ machine_types = list(string), min = number, max = number })
  default     = { machine_types = ["m7i.large", "m6i.large"], min = 2, max = 6 }
}

variable "ports" {
  description = "Ports that gateways serve: `api` to clients, `sites` to the sites that dial in. An unprivileged process listens, so 1024 or higher."
  type        = map(number)
  default     = { api = 8443, sites = 8081 }
}

variable "settings" {
  description = "Settings of the gateways, as environment; nothing secret."
  type        = map(string)
  default     = {}
}

variable "secrets" {
  description = "Secrets of the gateways, from name to text: NAMES_LIKE_THIS become environment, others such as tls.key files in /run/mico. Never in plan or state."
  type        = map(string)
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
}

variable "secrets_version" {
  description = "Raise it when secrets or database_password change; that is what makes Terraform write them."
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
